"""Runs a traced program with the outputs of its op calls as extra results.

The program is interpreted equation by equation; loops over layers are built anew with the taps as
stacked outputs. Ops themselves run as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from isojax.contract.stablehlo import op_name
from isojax.ops.op import is_op

# calls that are opened; "jit" is what an undecorated jitted helper is
_OPENED = (
    "jit",
    "pjit",
    "closed_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)


@dataclasses.dataclass(frozen=True)
class Tap:
    """An op call: its name, and how many loops it stands in: leading axes of its arrays."""

    op: str
    depth: int


Kept = Callable[[Any], bool]


def tapped(function: Callable[..., Any], keep: Kept) -> Callable[..., Any]:
    """`function` with its taps: (*args) -> (result, arrays); `arrays[i]` is a tuple for call i.

    keep: which outputs (by their aval) of an op call are tapped. The returned function has an
    attribute `taps`, list[Tap], once it has been traced.
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run.taps = []  # type: ignore[attr-defined]
        flat = jax.tree.leaves(args)
        outs, arrays = _evaluate(closed.jaxpr, closed.consts, flat, keep, run.taps, 0)  # type: ignore[attr-defined]
        return jax.tree.unflatten(jax.tree.structure(shape), outs), arrays

    return run


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence, args: Sequence, keep: Kept, taps: list[Tap], depth: int
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    arrays: list[tuple[Any, ...]] = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        name, primitive = str(eqn.params.get("name", "")), eqn.primitive.name
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if is_op(name):
            outs = _bind(eqn, values)
            taps.append(Tap(op_name(name) or name, depth))
            arrays.append(tuple(x for x, v in zip(outs, eqn.outvars, strict=True) if keep(v.aval)))
        elif primitive == "scan":
            outs, more = _scan(eqn, values, keep, taps, depth)
            arrays += more
        elif primitive in _OPENED and inner is not None:
            outs, more = _evaluate(inner, inner.consts, values, keep, taps, depth)
            arrays += more
        else:
            outs = _bind(eqn, values)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], arrays


def _bind(eqn: Any, values: list[Any]) -> list[Any]:
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _scan(eqn: Any, values: list[Any], keep: Kept, taps: list[Tap], depth: int) -> tuple:
    params = eqn.params
    fixed, carried, _ = (len(part) for part in params["ft_in"].unpack())
    consts, carry = values[:fixed], values[fixed : fixed + carried]
    inner = params["jaxpr"]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
        del taps[before:]  # a body may be traced more than once
        outs, arrays = _evaluate(inner, inner.consts, [*consts, *carry, *xs], keep, taps, depth + 1)
        return outs[:carried], (outs[carried:], arrays)

    before = len(taps)
    carry, (stacked, arrays) = lax.scan(
        body,
        carry,
        values[fixed + carried :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], arrays
