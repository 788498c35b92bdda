"""What the gated delta kernels share: one product, and the arithmetic of rows that must agree bit for bit.

Tiles are 64 rows of one chunk. A row's bits do not depend on its place in the tile, so the decode kernel, whose
tiles hold one meaningful row, and the prefill kernels, whose tiles hold a chunk, run these same functions.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
# Terms of T's row recurrence that one loop step adds.
UNROLL = 8


PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def operand(*shape: int, dtype=jnp.bfloat16):
    """Shared memory [..., M, N] that the tensor cores read: 8-row tiles, swizzled over a row of a tile."""
    width = min(shape[-1], 64)
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(a, b) -> jax.Array:
    """a [M, K] times b [K, N], references to shared memory -> float32 [M, N], K in order."""

    def scope(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(scope, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def replicated_product(a: jax.Array, buffer, b) -> jax.Array:
    """`product` of a tile [64, K] in registers, by way of `buffer` in shared memory."""
    buffer[...] = a
    plgpu.commit_smem()
    return product(buffer, b)


def any_row(x: jax.Array) -> jax.Array:
    """A row [N] of x [M, N] whose rows are all the same."""
    return jnp.max(x.astype(jnp.float32), axis=0).astype(x.dtype)


def rows(x: jax.Array, width: int) -> jax.Array:
    """A value per row [M] along `width` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def columns(x: jax.Array, height: int) -> jax.Array:
    """A value per column [N] along `height` rows."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), (1,))


def index(shape: tuple[int, int], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def unit(x: jax.Array, epsilon: float, scale: float) -> tuple[jax.Array, jax.Array]:
    """Rows of x [M, K] float32 at length `scale`, and the factors [M] that make them unit."""
    squares = lax.optimization_barrier(x * x)
    factor = lax.rsqrt(jnp.sum(squares, axis=1) + epsilon)
    return x * rows(factor, x.shape[1]) * scale, factor


def running_sum(given, at, held) -> jax.Array:
    """G [C] in row layout: held[c] before row `at`, from there on the sum so far plus given[c].

    given, held: references [C] float32 to shared memory.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROW)

    def add(c, carry):
        total, sums = carry
        total = jnp.where(c < at, held[c], total + given[c])
        return total, jnp.where(row == c, total, sums)

    zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROW)
    return lax.fori_loop(0, CHUNK, add, (jnp.float32(0), zero))[1]


def inverse_row(i, lower: tuple, known, heads: int) -> jax.Array:
    """Row i of T of two heads side by side, float32 [128]: e_i + sum_{j<i} (-L_ij) T_j, j in order.

    lower: for each of the two heads a function j -> -L_ij, zero for j >= i. known [C, 128]: earlier rows of T,
    finite in all rows. heads: how many of the two there are.
    """
    lane = plgpu.layout_cast(
        lax.broadcasted_iota(jnp.int32, (2 * CHUNK,), 0),
        plgpu.Layout.WG_STRIDED((2 * CHUNK,), 1),
    )
    first = lane < CHUNK
    start = jnp.where(jnp.where(first, lane, lane - CHUNK) == i, 1.0, 0.0)

    def step(block, total):
        for u in range(UNROLL):
            j = block * UNROLL + u
            row = known[j].astype(jnp.float32)
            factor = lower[0](j)
            if heads == 2:
                factor = jnp.where(first, factor, lower[1](j))
            total = total + factor * row
        return total

    return lax.fori_loop(0, lax.div(i + UNROLL - 1, UNROLL), step, start)
