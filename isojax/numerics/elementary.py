"""exp and log of float32, written out in products, sums and integer shifts.

XLA's CPU backend has more than one exp and more than one log: a loop over a few elements that it
unrolls gets another polynomial than a vectorised one, so the bits would depend on how many rows or
heads a rank has. Here the polynomial is in the program text. Errors are within 3 units in the last
place. Results below the smallest normal number are 0, and so are such arguments of log.
Source: S. L. Moshier, Cephes mathematical library (expf, logf).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# ln 2 in two parts: products of the first with small integers are exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LARGEST, _SMALLEST = 88.72283, -87.33654  # exp overflows above, is subnormal below
_TINY = float(np.finfo(np.float32).tiny)


def _polynomial(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    total = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + c
    return total


def _power_of_two(n: jax.Array) -> jax.Array:
    """2**n for int32 n within [-126, 127]."""
    return lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


@jax.custom_jvp
def exp(x: jax.Array) -> jax.Array:
    """e**x elementwise, float32; exp(0) is exactly 1."""
    clipped = jnp.clip(x, _SMALLEST, _LARGEST)
    n = lax.round(clipped * 1.44269504, lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (clipped - n * _LN2_HIGH) - n * _LN2_LOW
    y = (_polynomial(r, _EXP) * (r * r) + r) + 1.0
    whole = n.astype(jnp.int32)
    half = whole >> 1
    y = y * _power_of_two(half) * _power_of_two(whole - half)
    return jnp.where(x < _SMALLEST, 0.0, jnp.where(x > _LARGEST, jnp.inf, y))


@exp.defjvp
def _exp_jvp(primals, tangents):
    y = exp(*primals)
    return y, tangents[0] * y


def _log_near_one(m: jax.Array, e: jax.Array) -> jax.Array:
    """log((1 + m) * 2**e) for 1 + m within [sqrt(1/2), sqrt(2)]."""
    z = m * m
    y = (m * z) * _polynomial(m, _LOG) + e * _LN2_LOW
    return (m + (y - 0.5 * z)) + e * _LN2_HIGH


@jax.custom_jvp
def log(x: jax.Array) -> jax.Array:
    """Natural logarithm elementwise, float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) - 126
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F000000, jnp.float32)
    low = mantissa < 0.70710678
    m = jnp.where(low, mantissa + mantissa, mantissa) - 1.0
    e = jnp.where(low, exponent - 1, exponent).astype(jnp.float32)
    y = _log_near_one(m, e)
    y = jnp.where(x == jnp.inf, jnp.inf, jnp.where(x < _TINY, -jnp.inf, y))
    return jnp.where((x < 0) | jnp.isnan(x), jnp.nan, y)


@log.defjvp
def _log_jvp(primals, tangents):
    return log(*primals), tangents[0] / primals[0]


def log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) elementwise, float32, for x >= -1."""
    near = (x > -0.29289) & (x < 0.41421)
    m = jnp.where(near, x, 0.0)
    return jnp.where(near, _log_near_one(m, jnp.zeros_like(m)), log(1.0 + x))


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) elementwise, float32."""
    return 1.0 / (1.0 + exp(-x))


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    s = sigmoid(*primals)
    return s, tangents[0] * (s * (1.0 - s))


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x) elementwise, float32."""
    return x * sigmoid(x)
