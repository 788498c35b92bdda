"""Rotary position embedding: the first features of every head turn by the token's angles."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rows import WARPS, row_layout


def rotary(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate x by a table; with `-sine` it is its own gradient.

    Args:
      x: [T, heads, D], D a multiple of 32.
      cosine, sine: [T, R / 2] float32, R / 2 a multiple of 32; the halves of the first R features
        are paired.

    Returns:
      [T, heads, D] of x's dtype, rounded once; features from R on are unchanged.

    Raises:
      ValueError: for widths that are no multiples of 32.
    """
    tokens, heads, width = x.shape
    half = cosine.shape[1]
    rest = width - 2 * half
    padded = max(tokens, WARPS)
    extra = ((0, padded - tokens), (0, 0))
    x = jnp.pad(x, (*extra, (0, 0)))
    turning = row_layout(half)

    def body(x_gmem, cosine_gmem, sine_gmem, out_gmem):
        span = pl.ds(lax.min(lax.axis_index("token") * WARPS, padded - WARPS), WARPS)

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        c, s = load(cosine_gmem.at[span], turning), load(sine_gmem.at[span], turning)
        head = lax.axis_index("head")
        low, high = pl.ds(0, half), pl.ds(half, half)
        a = load(x_gmem.at[span, head, low], turning).astype(jnp.float32)
        b = load(x_gmem.at[span, head, high], turning).astype(jnp.float32)
        out_gmem[span, head, low] = (a * c - b * s).astype(x.dtype)
        out_gmem[span, head, high] = (b * c + a * s).astype(x.dtype)
        if rest:
            same = pl.ds(2 * half, rest)
            out_gmem[span, head, same] = load(x_gmem.at[span, head, same], row_layout(rest))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((padded, heads, width), x.dtype),
        grid=(pl.cdiv(padded, WARPS), heads),
        grid_names=("token", "head"),
        kernel_name="rotary",
    )(x, jnp.pad(cosine, extra), jnp.pad(sine, extra))
    return out if padded == tokens else out[:tokens]
