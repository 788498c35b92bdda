"""Causal depthwise convolution over ragged sequences, followed by silu, and its backward.

    out[t, c] = silu( sum over taps j, by halving, of w[c, j] input(t - width + 1 + j, c) )

Where a tap's input lies is given as integers: a row of `x`, a row of the cached state, or nowhere
(before the sequence: zero). Arithmetic is float32 with one rounding of a result.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves
from pallas_kernels.rows import sigmoid
from pallas_kernels.rows_token_sum import BLOCK, join_blocks

NOWHERE = -1  # no input: zero
_VECTOR = 4


def _slab(channels: int) -> int:
    """Channels of a step, up to 4 a thread."""
    size = next((128 * v for v in (_VECTOR, 2, 1) if channels % (128 * v) == 0), None)
    if size is None:
        raise ValueError(f"{channels} channels are not a multiple of 128")
    return size


def _halving(terms: Sequence[jax.Array]) -> jax.Array:
    terms = list(terms)
    terms += [jnp.zeros_like(terms[0])] * ((1 << (len(terms) - 1).bit_length()) - len(terms))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _silu_slope(z, s):
    return s * (1.0 + z * (1.0 - s))


def convolution(x: jax.Array, w: jax.Array, state: jax.Array, source: jax.Array) -> jax.Array:
    """The convolution of every row.

    Args:
      x: [T, C], C a multiple of 128.
      w: [C, width].
      state: [S, C] of x's dtype, rows of cached inputs.
      source: [T, width] int32, oldest tap first: i >= 0 is row i of x, NOWHERE is zero, and
        i < NOWHERE is row -2 - i of `state`.

    Returns:
      [T, C] of x's dtype.

    Raises:
      ValueError: if C is not a multiple of 128.
    """
    tokens, channels = x.shape
    width, slab = w.shape[1], _slab(channels)

    def body(x_gmem, w_gmem, state_gmem, source_gmem, out_gmem):
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        first = lax.axis_index("block") * _ROWS

        def one(row, _):
            sources = [source_gmem[row, j] for j in range(width)]

            def cached():
                return tuple(_read(x_gmem, state_gmem, source, span) for source in sources)

            def here():
                return tuple(_row_or_zero(x_gmem, source, span) for source in sources)

            oldest = functools.reduce(lax.min, sources)
            z = _dot(lax.cond(oldest < NOWHERE, cached, here), taps)
            out_gmem[row, span] = (z * sigmoid(z)).astype(x.dtype)

        lax.fori_loop(first, lax.min(first + _ROWS, tokens), one, None)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid=(pl.cdiv(tokens, _ROWS), channels // slab),
        grid_names=("block", "slab"),
        kernel_name="convolution",
    )(x, w.T, state, source)


_ROWS = 8  # rows of a block: they share one load of the weights
# Rows of a step of the backward, whose loads overlap. They are written out side by side, and what
# jax takes to lay out a kernel's registers grows with the cube of its length.
_STEP = 4


def _taps(w_gmem, span, width: int) -> list[jax.Array]:
    return [w_gmem[j, span].astype(jnp.float32) for j in range(width)]


def _dot(values, taps) -> jax.Array:
    return _halving([value * tap for value, tap in zip(values, taps, strict=True)])


def _row_or_zero(ref, row, span):
    """Float32 ref[row, span], or zero if `row` is NOWHERE; without a branch, so loads overlap."""
    value = ref[lax.max(row, 0), span].astype(jnp.float32)
    nowhere = lax.broadcast(row, (span.size,)) == NOWHERE
    return jnp.where(nowhere, jnp.zeros_like(value), value)


def _read(x_gmem, state_gmem, source, span):
    return lax.cond(
        source < NOWHERE,
        lambda: state_gmem[lax.max(-2 - source, 0), span].astype(jnp.float32),
        lambda: _row_or_zero(x_gmem, source, span),
    )


def convolution_backward(
    x: jax.Array, w: jax.Array, source: jax.Array, follower: jax.Array, dy: jax.Array, leaves: int
) -> tuple[jax.Array, jax.Array]:
    """Of `convolution` on whole sequences (no cached inputs).

    Args:
      x, w: as there.
      source: as there, without rows of state; the newest tap of a row reads the row itself, or
        NOWHERE if it is none of a sequence's: then its dy is not read either.
      follower: [T, width] int32: the row whose tap j is this row, or NOWHERE. Tap j of row t reads
        row source[t, j], so follower[source[t, j], j] = t.
      dy: [T, C], gradient of the result.
      leaves: equal contiguous parts of the rows, a power of two.

    Returns:
      (dx [T, C] of x's dtype, a leaf's share of dw [leaves, width, C] float32: blocks of 64 rows,
      rows in order).

    Raises:
      ValueError: if C is not a multiple of 128, or for leaves that do not divide T.
    """
    tokens, channels = x.shape
    width, slab = w.shape[1], _slab(channels)
    check_leaves(tokens, leaves)
    length = tokens // leaves
    blocks = pl.cdiv(length, BLOCK)
    step = math.gcd(length, _STEP)

    def slopes(x_gmem, w_gmem, source_gmem, dy_gmem, d_gmem, dw_gmem):
        leaf, block = lax.axis_index("leaf"), lax.axis_index("block")
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)

        def add_rows(i, sums):
            first = leaf * length + block * BLOCK + i * step
            rows = [first + j for j in range(step)]
            windows = [
                [_row_or_zero(x_gmem, source_gmem[row, j], span) for j in range(width)]
                for row in rows
            ]
            for row, window in zip(rows, windows, strict=True):
                z = _dot(window, taps)
                dy = _row_or_zero(dy_gmem, source_gmem[row, width - 1], span)
                d = dy * _silu_slope(z, sigmoid(z))
                d_gmem[row, span] = d
                sums = tuple(total + d * value for total, value in zip(sums, window, strict=True))
            return sums

        zero = jnp.zeros((slab,), jnp.float32)
        count = lax.min(length - block * BLOCK, BLOCK) // step
        sums = lax.fori_loop(0, count, add_rows, (zero,) * width)
        for j, total in enumerate(sums):
            dw_gmem[leaf * blocks + block, j, span] = total

    d, partial = plgpu.kernel(
        slopes,
        out_type=[
            jax.ShapeDtypeStruct((tokens, channels), jnp.float32),
            jax.ShapeDtypeStruct((leaves * blocks, width, channels), jnp.float32),
        ],
        grid=(leaves, blocks, channels // slab),
        grid_names=("leaf", "block", "slab"),
        kernel_name="convolution_slopes",
    )(x, w.T, source, dy)

    def inputs(d_gmem, w_gmem, follower_gmem, dx_gmem):
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        for i in range(step):
            row = lax.axis_index("row") * step + i
            later = [_row_or_zero(d_gmem, follower_gmem[row, j], span) for j in range(width)]
            dx_gmem[row, span] = _dot(later, taps).astype(x.dtype)

    dx = plgpu.kernel(
        inputs,
        out_type=jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid=(tokens // step, channels // slab),
        grid_names=("row", "slab"),
        kernel_name="convolution_inputs",
    )(d, w.T, follower)
    dw = join_blocks(partial.reshape(leaves * blocks, width * channels), leaves)
    return dx, dw.reshape(leaves, width, channels)
