"""A parameter as an op sees it: an array, or an array with a float32 place for its gradient.

jax gives a cotangent the dtype of its primal, so the gradient of a bfloat16 weight would be rounded
on every rank before ranks are summed, and the sum would depend on the mesh. A `Weight` carries a
float32 array of the same shape beside the value; no op reads it, and an op's vjp delivers the
gradient to it.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass


@partial(register_dataclass, data_fields=["value", "place"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Weight:
    """value: the parameter, compute dtype. place: float32 of its shape, receives the gradient."""

    value: jax.Array
    place: jax.Array


Parameter = jax.Array | Weight


def value(w: Parameter) -> jax.Array:
    """The array of a parameter."""
    return w.value if isinstance(w, Weight) else w


def cotangent(w: Parameter, gradient: jax.Array) -> Any:
    """What a vjp returns for parameter `w` whose float32 gradient is `gradient`."""
    if isinstance(w, Weight):
        return Weight(None, gradient)  # type: ignore[arg-type]
    return gradient.astype(w.dtype)


def places(params: Any) -> Any:
    """The tree to differentiate by: float32 parameters themselves, zeros in place of the others."""
    return jax.tree.map(
        lambda p: p if p.dtype == jnp.float32 else jnp.zeros(p.shape, jnp.float32), params
    )


def attach(params: Any, at: Any) -> Any:
    """Join parameters and `places(params)`, so that gradients by the latter are float32."""
    return jax.tree.map(lambda p, a: a if p.dtype == jnp.float32 else Weight(p, a), params, at)
