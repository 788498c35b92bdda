"""Rotary position embedding on the first `rotary_dim` features of a head, halves paired.

Row: out[t] depends on x[t] and the token's position alone. Tree: none.
Rounding: angles, cosines and products are float32; the result is rounded once.
Gradient: the rotation by the opposite angle.
Kernel: half of `rotary_dim`, and the features behind it, are multiples of 32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from isojax.numerics.policy import Policy
from isojax.ops.kernel import call
from isojax.ops.op import op
from pallas_kernels import rows_rotary as kernels


@op("rotary_table", static=("rotary_dim", "theta"))
def rotary_table(
    positions: jax.Array, *, rotary_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T] -> (cosine, sine), float32 [T, rotary_dim / 2].

    Both evaluations leave this to XLA: an angle is one product, and cosine and sine are functions
    of it alone; there is no sum that a fusion could contract or reorder. It is done once a call.
    Source: Su et al., arXiv 2104.09864. The frequencies are computed once, in float64, at trace
    time.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequency = jnp.asarray((1.0 / theta**exponent).astype(np.float32))
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotary(policy, x, cosine, sine):
    if policy.evaluation == "mosaic":
        return call(kernels.rotary, x, cosine, sine)
    half = cosine.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    c, s = cosine[:, None, :], sine[:, None, :]
    turned = jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _rotary_forward(policy, x, cosine, sine):
    return _rotary(policy, x, cosine, sine), (cosine, sine)


def _rotary_backward(policy, table, dout):
    cosine, sine = table
    return _rotary(policy, dout, cosine, -sine), None, None


_rotary.defvjp(_rotary_forward, _rotary_backward)


@op("rotary", static=("policy",))
def rotary(x: jax.Array, cosine: jax.Array, sine: jax.Array, *, policy: Policy) -> jax.Array:
    """Rotate x [T, heads, D] by the table [T, R / 2]; features from R on pass unchanged.

    Raises:
      ValueError: for widths that the kernel does not take.
    """
    return _rotary(policy, x, cosine, sine)
