"""The gates of a gated delta rule: how fast a head's state fades and how strongly it is written."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.rows import along, row_kernel, sigmoid, to_f32

_LINE = 128
# 1 / 3, 1 / 5, ...: atanh(s) = s + s^3 / 3 + ..., to 1e-9 of it for s <= 1 / 3
_ATANH = tuple(1.0 / n for n in range(15, 1, -2))


def _softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)) = max(x, 0) + 2 atanh(e / (2 + e)) with e = exp(-|x|)."""
    e = jnp.exp(-jnp.abs(x))
    s = e / (2.0 + e)
    square = s * s
    total = jnp.full_like(s, _ATANH[0])
    for c in _ATANH[1:]:
        total = total * square + c
    return jnp.maximum(x, 0.0) + 2.0 * (s + s * (square * total))


def _by_line(function, rows, shared, dtypes, name):
    """A row kernel on [T, H] arrays and [H] ones, whose row holds several tokens."""
    tokens, heads = rows[0].shape
    line = math.lcm(heads, _LINE)
    several = line // heads
    extra = -tokens % several
    rows = [jnp.pad(x, ((0, extra), (0, 0))).reshape(-1, line) for x in rows]
    shared = [jnp.tile(x, several) for x in shared]
    outs = [(line, dtype) for dtype in dtypes]
    results = row_kernel(function, rows, shared, outs, name, elements=16)
    return tuple(x.reshape(-1, heads)[:tokens] for x in results)


def gates(
    a: jax.Array, b: jax.Array, A_log: jax.Array, dt_bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and write strength beta = sigmoid(b).

    Args:
      a, b: [T, H], any number of heads.
      A_log, dt_bias: [H] float32.

    Returns:
      (g, beta), [T, H] float32.
    """

    def function(a, b, A_log, dt_bias):
        x, y = to_f32(a, b)
        x = x + along(dt_bias, x)
        return along(-jnp.exp(A_log), x) * _softplus(x), sigmoid(y)

    return _by_line(function, (a, b), (A_log, dt_bias), (jnp.float32,) * 2, "gates")


def gates_backward(
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    dg: jax.Array,
    dbeta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of `gates`, dg and dbeta [T, H] float32.

    Returns:
      (da, db [T, H] of their dtypes, terms of dA_log and of ddt_bias, [T, H] float32).
    """

    def function(a, b, dg, dbeta, A_log, dt_bias):
        x, y = to_f32(a, b)
        x = x + along(dt_bias, x)
        fade, beta = along(-jnp.exp(A_log), x), sigmoid(y)
        dx = dg * fade * sigmoid(x)
        return dx, dbeta * (beta * (1.0 - beta)), dg * (fade * _softplus(x)), dx

    dtypes = a.dtype, b.dtype, jnp.float32, jnp.float32
    return _by_line(function, (a, b, dg, dbeta), (A_log, dt_bias), dtypes, "gates_backward")
