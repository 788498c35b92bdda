"""Elementwise ops of a row: what joins branches and opens gates.

Row: out[t] depends on the inputs' row t alone. Tree: none (one sum over a row in `gated_add`'s
gradient).
Rounding: float32 inside, one rounding to the input's dtype.
"""

import jax
import jax.numpy as jnp

from isojax.numerics import elementary
from isojax.numerics.trees import tree_sum
from isojax.ops.op import op


@op("add")
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, rounded once: the residual stream."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


@op("swiglu")
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Source: Shazeer, arXiv 2002.05202."""
    return (elementary.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


@op("sigmoid_gate")
def sigmoid_gate(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x * sigmoid(gate), same shapes."""
    return (x.astype(jnp.float32) * elementary.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


@jax.custom_vjp
def _gated_add(x, y, gate):
    opened = y.astype(jnp.float32) * elementary.sigmoid(gate.astype(jnp.float32))
    return (x.astype(jnp.float32) + opened).astype(x.dtype)


def _gated_add_forward(x, y, gate):
    return _gated_add(x, y, gate), (y, gate)


def _gated_add_backward(saved, dout):
    y, gate = saved
    d, s = dout.astype(jnp.float32), elementary.sigmoid(gate.astype(jnp.float32))
    dgate = tree_sum(d * y.astype(jnp.float32))[:, None] * (s * (1.0 - s))
    return dout, (d * s).astype(y.dtype), dgate.astype(gate.dtype)


_gated_add.defvjp(_gated_add_forward, _gated_add_backward)


@op("gated_add")
def gated_add(x: jax.Array, y: jax.Array, gate: jax.Array) -> jax.Array:
    """x + y * sigmoid(gate): x, y [T, H], gate [T, 1]."""
    return _gated_add(x, y, gate)
