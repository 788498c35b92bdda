"""Proof that the forward does no floating-point arithmetic outside its ops.

Between ops only movement is allowed: an operation whose float outputs are copies of its float
inputs, or a cast. Whatever else touches a float outside a call named ``iso_*`` is a finding, for
XLA would choose how to round it, fuse it and order its sums. In the Hopper evaluation the kernels
take the place of the ops: `outside_kernels` lists what XLA would still compute.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from isojax.ops.op import is_op

MOVEMENT = frozenset({
    "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim", "concatenate",
    "convert_element_type", "copy", "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice",
    "expand_dims", "freeze", "gather", "new_ref", "optimization_barrier", "pad", "pcast",
    "ppermute", "pvary", "reshape", "rev", "scatter", "select_n", "sharding_constraint", "slice",
    "split", "squeeze", "stack", "stop_gradient", "tile", "top_k", "transpose",
})  # fmt: skip

KERNEL = "mpmd_map"  # the primitive that calls a Pallas kernel


@dataclasses.dataclass(frozen=True)
class Finding:
    """One float operation out of place: its primitive, where it was written, its path."""

    primitive: str
    source: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source} (in {' > '.join(self.path) or 'the program'})"


def _is_float(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _inner(value: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs inside an equation's parameter."""
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _inner(item)


def _name(eqn: Any) -> str:
    return str(eqn.params.get("name", eqn.primitive.name))


def _calls_op(eqn: Any) -> bool:
    return is_op(_name(eqn))


def _calls_kernel(eqn: Any) -> bool:
    return eqn.primitive.name == KERNEL


def findings(
    jaxpr: core.Jaxpr,
    path: tuple[str, ...] = (),
    holds: Callable[[Any], bool] = _calls_op,
) -> Iterator[Finding]:
    """Float arithmetic of `jaxpr` outside what `holds` (ops), in program order."""
    for eqn in jaxpr.eqns:
        name = _name(eqn)
        if holds(eqn):
            continue
        inside = [j for value in eqn.params.values() for j in _inner(value)]
        if inside and not eqn.primitive.name.startswith(("scatter", "reduce")):
            for j in inside:
                yield from findings(j, (*path, name), holds)
        elif eqn.primitive.name not in MOVEMENT and any(map(_is_float, eqn.invars)):
            yield Finding(eqn.primitive.name, _where(eqn.source_info), path)


def _where(source_info: Any) -> str:
    from jax._src import source_info_util  # the only reader of an equation's source

    return source_info_util.summarize(source_info)


def audit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Finding]:
    """Trace function(*args, **kwargs), of arrays or ShapeDtypeStructs; list what is outside ops."""
    return list(findings(jax.make_jaxpr(lambda *a: function(*a, **kwargs))(*args).jaxpr))


def outside_kernels(function: Callable[..., Any], *args: Any) -> list[Finding]:
    """As `audit`, but of what no kernel holds, inside ops and out."""
    return list(findings(jax.make_jaxpr(function)(*args).jaxpr, holds=_calls_kernel))


def op_calls(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Names of the ops that a program calls, in program order, loop bodies once."""
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        if is_op(name):
            yield name
            continue
        for value in eqn.params.values():
            for j in _inner(value):
                yield from op_calls(j)
