"""Elementwise ops of a row: what joins branches and opens gates.

Row: out[t] depends on the inputs' row t alone. Tree: none (one sum over a row in `gated_add`'s
gradient).
Rounding: float32 inside, one rounding to the input's dtype.
Kernels: what a rank holds of an input is a multiple of 32 elements.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import tree_sum
from isojax.ops.kernel import call
from isojax.ops.op import op
from pallas_kernels import rows_elementwise as kernels


def _evaluated(reference: Callable, kernel: Callable, gradient: Callable) -> Callable:
    """`f(policy, *inputs)`: the reference, as jax differentiates it, or the two kernels."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def evaluate(policy, *inputs):
        return call(kernel, *inputs) if policy.evaluation == "mosaic" else reference(*inputs)

    def forward(policy, *inputs):
        return evaluate(policy, *inputs), inputs

    def backward(policy, inputs, dout):
        if policy.evaluation == "mosaic":
            return call(gradient, *inputs, dout)
        return jax.vjp(reference, *inputs)[1](dout)

    evaluate.defvjp(forward, backward)
    return evaluate


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add(policy, x, y):
    if policy.evaluation == "mosaic":
        return call(kernels.add, x, y)
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


_add.defvjp(lambda policy, x, y: (_add(policy, x, y), None), lambda policy, _, dout: (dout, dout))


@op("add", static=("policy",))
def add(x: jax.Array, y: jax.Array, *, policy: Policy) -> jax.Array:
    """x + y of one shape and dtype, rounded once: the residual stream."""
    return _add(policy, x, y)


def _swiglu_reference(gate, up):
    return (elementary.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


_swiglu = _evaluated(_swiglu_reference, kernels.swiglu, kernels.swiglu_backward)


@op("swiglu", static=("policy",))
def swiglu(gate: jax.Array, up: jax.Array, *, policy: Policy) -> jax.Array:
    """silu(gate) * up. Source: Shazeer, arXiv 2002.05202."""
    return _swiglu(policy, gate, up)


def _sigmoid_gate_reference(x, gate):
    return (x.astype(jnp.float32) * elementary.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


_sigmoid_gate = _evaluated(
    _sigmoid_gate_reference, kernels.sigmoid_gate, kernels.sigmoid_gate_backward
)


@op("sigmoid_gate", static=("policy",))
def sigmoid_gate(x: jax.Array, gate: jax.Array, *, policy: Policy) -> jax.Array:
    """x * sigmoid(gate), same shapes."""
    return _sigmoid_gate(policy, x, gate)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_add(policy, x, y, gate):
    if policy.evaluation == "mosaic":
        return call(kernels.gated_add, x, y, gate[:, 0])
    opened = y.astype(jnp.float32) * elementary.sigmoid(gate.astype(jnp.float32))
    return (x.astype(jnp.float32) + opened).astype(x.dtype)


def _gated_add_forward(policy, x, y, gate):
    return _gated_add(policy, x, y, gate), (y, gate)


def _gated_add_backward(policy, saved, dout):
    y, gate = saved
    if policy.evaluation == "mosaic":
        dy, dgate = call(kernels.gated_add_backward, y, gate[:, 0], dout)
        return dout, dy, dgate[:, None]
    d, s = dout.astype(jnp.float32), elementary.sigmoid(gate.astype(jnp.float32))
    dgate = tree_sum(d * y.astype(jnp.float32))[:, None] * (s * (1.0 - s))
    return dout, (d * s).astype(y.dtype), dgate.astype(gate.dtype)


_gated_add.defvjp(_gated_add_forward, _gated_add_backward)


@op("gated_add", static=("policy",))
def gated_add(x: jax.Array, y: jax.Array, gate: jax.Array, *, policy: Policy) -> jax.Array:
    """x + y * sigmoid(gate): x, y [T, H], gate [T, 1]."""
    return _gated_add(policy, x, y, gate)
