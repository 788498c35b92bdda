"""Norms over the last axis: RMS norm (plain or zero-centred weight, gated), L2 norm; and backward.

Arithmetic is float32 with one rounding of every result. A backward returns, instead of a weight
gradient, the rows' float32 terms of it: summing them over tokens is `token_sum`'s business.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows import along, row_kernel, sigmoid, spread, to_f32


def _inverse_rms(x, epsilon):
    return lax.rsqrt(jnp.sum(x * x, axis=1) * (1.0 / x.shape[1]) + epsilon)


def _scale(w, zero_centered, like):
    (w,) = to_f32(w)
    return along(1.0 + w if zero_centered else w, like)


def rms_norm(x: jax.Array, w: jax.Array, *, epsilon: float, zero_centered: bool) -> jax.Array:
    """x / rms(x) * w, or * (1 + w) if `zero_centered`: x [R, D], w [D] -> [R, D] of x's dtype."""

    def function(x, w):
        (y,) = to_f32(x)
        return (y * spread(_inverse_rms(y, epsilon), y) * _scale(w, zero_centered, y),)

    (out,) = row_kernel(function, (x,), (w,), [(x.shape[1], x.dtype)], "rms_norm")
    return out


def _norm_backward(y, dn, epsilon):
    """For n = y / rms(y): (n, gradient by y)."""
    r = spread(_inverse_rms(y, epsilon), y)
    n = y * r
    mean = jnp.sum(dn * n, axis=1) * (1.0 / y.shape[1])
    return n, r * (dn - n * spread(mean, y))


def rms_norm_backward(
    x: jax.Array, w: jax.Array, dy: jax.Array, *, epsilon: float, zero_centered: bool
) -> tuple[jax.Array, jax.Array]:
    """Of `rms_norm`, dy [R, D]: (dx [R, D] of x's dtype, terms of dw [R, D] float32)."""

    def function(x, dy, w):
        y, dy = to_f32(x, dy)
        n, dx = _norm_backward(y, dy * _scale(w, zero_centered, y), epsilon)
        return dx, dy * n

    outs = [(x.shape[1], x.dtype), (x.shape[1], jnp.float32)]
    dx, terms = row_kernel(function, (x, dy), (w,), outs, "rms_norm_backward", elements=16)
    return dx, terms


def gated_rms_norm(x: jax.Array, gate: jax.Array, w: jax.Array, *, epsilon: float) -> jax.Array:
    """x / rms(x) * w * silu(gate): x, gate [R, D], w [D] -> [R, D] of x's dtype."""

    def function(x, gate, w):
        y, z = to_f32(x, gate)
        y = y * spread(_inverse_rms(y, epsilon), y) * _scale(w, False, y)
        return (y * (z * sigmoid(z)),)

    outs = [(x.shape[1], x.dtype)]
    (out,) = row_kernel(function, (x, gate), (w,), outs, "gated_rms_norm", elements=16)
    return out


def gated_rms_norm_backward(
    x: jax.Array, gate: jax.Array, w: jax.Array, dy: jax.Array, *, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `gated_rms_norm`, dy [R, D]: (dx, dgate, terms of dw), the last [R, D] float32."""

    def function(x, gate, dy, w):
        y, z, dy = to_f32(x, gate, dy)
        scale, s = _scale(w, False, y), sigmoid(z)
        opened = dy * (z * s)
        n, dx = _norm_backward(y, opened * scale, epsilon)
        return dx, dy * n * scale * (s * (1.0 + z * (1.0 - s))), opened * n

    outs = [(x.shape[1], x.dtype), (x.shape[1], gate.dtype), (x.shape[1], jnp.float32)]
    name = "gated_rms_norm_backward"
    return tuple(row_kernel(function, (x, gate, dy), (w,), outs, name, elements=8))


def _inverse_norm(x, epsilon):
    return lax.rsqrt(jnp.sum(x * x, axis=1) + epsilon)


def l2_norm(x: jax.Array, *, epsilon: float) -> jax.Array:
    """x / sqrt(sum(x^2) + epsilon): x [R, D] -> [R, D] of x's dtype."""

    def function(x):
        (y,) = to_f32(x)
        return (y * spread(_inverse_norm(y, epsilon), y),)

    (out,) = row_kernel(function, (x,), (), [(x.shape[1], x.dtype)], "l2_norm")
    return out


def l2_norm_backward(x: jax.Array, dy: jax.Array, *, epsilon: float) -> jax.Array:
    """Of `l2_norm`, dy [R, D]: dx [R, D] of x's dtype."""

    def function(x, dy):
        y, dy = to_f32(x, dy)
        r = spread(_inverse_norm(y, epsilon), y)
        n = y * r
        return (r * (dy - n * spread(jnp.sum(dy * n, axis=1), y)),)

    outs = [(x.shape[1], x.dtype)]
    (dx,) = row_kernel(function, (x, dy), (), outs, "l2_norm_backward", elements=32)
    return dx
