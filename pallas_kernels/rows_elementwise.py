"""What joins branches and opens gates, a row at a time; float32 inside, one rounding a result."""

import jax
import jax.numpy as jnp

from pallas_kernels.rows import elementwise_kernel, row_kernel, sigmoid, spread, to_f32


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y of one shape, in x's dtype."""

    def function(x, y):
        x, y = to_f32(x, y)
        return (x + y,)

    return elementwise_kernel(function, (x, y), (x.dtype,), "add")[0]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up of one shape, in gate's dtype."""

    def function(gate, up):
        g, u = to_f32(gate, up)
        return (g * sigmoid(g) * u,)

    return elementwise_kernel(function, (gate, up), (gate.dtype,), "swiglu")[0]


def swiglu_backward(gate: jax.Array, up: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of `swiglu`: (gradient by gate, gradient by up)."""

    def function(gate, up, dy):
        g, u, d = to_f32(gate, up, dy)
        s = sigmoid(g)
        return d * u * (s * (1.0 + g * (1.0 - s))), d * (g * s)

    dtypes = gate.dtype, up.dtype
    return tuple(elementwise_kernel(function, (gate, up, dy), dtypes, "swiglu_backward"))


def sigmoid_gate(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x * sigmoid(gate) of one shape, in x's dtype."""

    def function(x, gate):
        x, g = to_f32(x, gate)
        return (x * sigmoid(g),)

    return elementwise_kernel(function, (x, gate), (x.dtype,), "sigmoid_gate")[0]


def sigmoid_gate_backward(
    x: jax.Array, gate: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of `sigmoid_gate`: (gradient by x, gradient by gate)."""

    def function(x, gate, dy):
        x, g, d = to_f32(x, gate, dy)
        s = sigmoid(g)
        return d * s, d * x * (s * (1.0 - s))

    dtypes = x.dtype, gate.dtype
    return tuple(elementwise_kernel(function, (x, gate, dy), dtypes, "sigmoid_gate_backward"))


def gated_add(x: jax.Array, y: jax.Array, gate: jax.Array) -> jax.Array:
    """x + y * sigmoid(gate): x, y [R, D], gate [R] -> [R, D] in x's dtype."""

    def function(x, y, gate):
        x, y, g = to_f32(x, y, gate)
        return (x + y * spread(sigmoid(g), y),)

    outs = [(x.shape[1], x.dtype)]
    return row_kernel(function, (x, y, gate), (), outs, "gated_add", elements=32)[0]


def gated_add_backward(y: jax.Array, gate: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of `gated_add`: (gradient by y [R, D], by gate [R]); the gradient by x is dy itself."""

    def function(y, dy, gate):
        y, d, g = to_f32(y, dy, gate)
        s = sigmoid(g)
        return d * spread(s, d), jnp.sum(d * y, axis=1) * (s * (1.0 - s))

    outs = [(y.shape[1], y.dtype), (None, gate.dtype)]
    return tuple(row_kernel(function, (y, dy, gate), (), outs, "gated_add_backward", elements=32))
