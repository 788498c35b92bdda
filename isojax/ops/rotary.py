"""Rotary position embedding on the first `rotary_dim` features of a head, halves paired.

Row: out[t] depends on x[t] and the token's position alone. Tree: none.
Rounding: angles, cosines and products are float32; the result is rounded once.
Gradient: the rotation by the opposite angle (autodiff of the formula gives it).
"""

import jax
import jax.numpy as jnp
import numpy as np

from isojax.ops.op import op


@op("rotary_table", static=("rotary_dim", "theta"))
def rotary_table(
    positions: jax.Array, *, rotary_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T] -> (cosine, sine), float32 [T, rotary_dim / 2].

    Source: Su et al., arXiv 2104.09864. The frequencies are computed once, in float64, at trace
    time.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequency = jnp.asarray((1.0 / theta**exponent).astype(np.float32))
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


@op("rotary")
def rotary(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate x [T, heads, D] by the table [T, R / 2]; features from R on pass unchanged."""
    half = cosine.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    c, s = cosine[:, None, :], sine[:, None, :]
    turned = jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
