"""Causal depthwise convolution over ragged sequences, followed by silu, and its backward.

    out[t, c] = silu( sum over taps j, by halving, of w[c, j] input(t - width + 1 + j, c) )

Where a tap's input lies is given as integers: its row of `x`, a row of the cached state, or nowhere
(before the sequence: zero). Arithmetic is float32 with one rounding of a result.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves
from pallas_kernels.rows import sigmoid, thread_vectors
from pallas_kernels.rows_token_sum import BLOCK, SLAB, join_blocks

NOWHERE = -1  # no input: zero


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
      source: [T, width] int32, oldest tap first: where tap j of row t lies. It is row
        t - width + 1 + j of x if that is what stands here; NOWHERE is zero, and i < NOWHERE is row
        -2 - i of `state`.

    Returns:
      [T, C] of x's dtype.

    Raises:
      ValueError: if C is not a multiple of 128.
    """
    tokens, channels = x.shape
    width, slab = w.shape[1], SLAB * thread_vectors(channels)
    step = math.gcd(tokens, _STEP)
    block_rows = _ROWS if tokens >= _MANY else step
    plain = jnp.all(source >= 0, axis=1).astype(jnp.int32)

    def body(x_gmem, w_gmem, state_gmem, source_gmem, plain_gmem, out_gmem):
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        first = lax.axis_index("block") * block_rows

        def load(row):
            here = lax.min(row, tokens - 1)
            return x_gmem[here, span], plain_gmem[here]

        def tap(row, j, value):
            source = source_gmem[row, j]
            return lax.cond(
                source < NOWHERE,
                lambda: state_gmem[lax.max(-2 - source, 0), span].astype(jnp.float32),
                lambda: _if(source + 1, value),
            )

        def rows(i, carry):
            loaded, inputs = carry
            row = first + i * step
            coming = tuple(load(row + step + k) for k in range(step))
            for k, (x, plain) in enumerate(loaded):
                inputs = [*inputs, x.astype(jnp.float32)][-width:]
                window = lax.cond(
                    plain > 0,
                    lambda inputs=inputs: tuple(inputs),
                    lambda inputs=inputs, k=k: tuple(
                        tap(row + k, j, value) for j, value in enumerate(inputs)
                    ),
                )
                z = _dot(window, taps)
                out_gmem[row + k, span] = (z * sigmoid(z)).astype(x.dtype)
            return coming, tuple(inputs[1 - width :])

        carry = tuple(load(first + k) for k in range(step)), _before(x_gmem, first, span, width)
        count = lax.min(tokens - first, block_rows)
        lax.fori_loop(0, lax.div(count, jnp.int32(step)), rows, carry)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid=(pl.cdiv(tokens, block_rows), channels // slab),
        grid_names=("block", "slab"),
        kernel_name="convolution",
    )(x, w.T, state, source, plain)


_ROWS = 16  # rows of a block: they share one load of the weights and of the rows before them
_MANY = 2048  # rows from which on there are blocks enough
# Rows of a step; those of the next one are on their way in the meantime. They are written out side
# by side, and what jax takes to lay out a kernel's registers grows with the cube of its length.
_STEP = 2
_BACKWARD_STEP = 1


def _taps(w_gmem, span, width: int) -> list[jax.Array]:
    return [w_gmem[j, span].astype(jnp.float32) for j in range(width)]


def _dot(values, taps) -> jax.Array:
    return _halving([value * tap for value, tap in zip(values, taps, strict=True)])


def _before(ref, row, span, width: int) -> tuple[jax.Array, ...]:
    """The rows before `row`, float32; one that `ref` has not is its first, which nobody uses."""
    rows = [lax.max(row - back, 0) for back in range(width - 1, 0, -1)]
    return tuple(ref[row, span].astype(jnp.float32) for row in rows)


def _if(condition, value):
    """`value`, or zero if the integer `condition` is 0."""
    none = lax.broadcast(condition, value.shape) == 0
    return jnp.where(none, jnp.zeros_like(value), value)


def _where_bits(bits, values, at: int):
    """values[j], or zero if bit `at + j` is not set; a branch, since hardly a row lacks any."""
    every = (1 << len(values)) - 1 << at
    return lax.cond(
        bits & every == every,
        lambda: tuple(values),
        lambda: tuple(_if(bits & (1 << at + j), value) for j, value in enumerate(values)),
    )


def convolution_backward(
    x: jax.Array, w: jax.Array, source: jax.Array, follower: jax.Array, dy: jax.Array, leaves: int
) -> tuple[jax.Array, jax.Array]:
    """Of `convolution` on whole sequences (no cached inputs).

    A block takes the rows in order, keeping the last ones' inputs and slopes in registers; it
    computes the slopes of the rows after its own a second time.

    Args:
      x, w: as there.
      source: as there, without rows of state; the newest tap of a row reads the row itself, or
        NOWHERE if it is none of a sequence's: then its dy is not read either.
      follower: [T, width] int32: the row t + width - 1 - j if its tap j reads row t, or NOWHERE.
      dy: [T, C], gradient of the result.
      leaves: equal contiguous parts of the rows, a power of two.

    Returns:
      (dx [T, C] of x's dtype, a leaf's share of dw [leaves, width, C] float32: blocks of 64 rows,
      rows in order).

    Raises:
      ValueError: if C is not a multiple of 128, or for leaves that do not divide T.
    """
    tokens, channels = x.shape
    width, slab = w.shape[1], SLAB * thread_vectors(channels)
    check_leaves(tokens, leaves)
    length = tokens // leaves
    blocks = pl.cdiv(length, BLOCK)
    step = math.gcd(length, _BACKWARD_STEP)
    # Bits: which taps of the row read anything (the newest twice), and as which taps it is read.
    places = jnp.concatenate([source, source[:, -1:], follower], axis=1)
    bits = 1 << jnp.arange(places.shape[1], dtype=jnp.int32)
    present = jnp.sum(jnp.where(places != NOWHERE, bits, 0), axis=1, dtype=jnp.int32)

    def body(x_gmem, w_gmem, present_gmem, dy_gmem, dx_gmem, dw_gmem):
        leaf, block = lax.axis_index("leaf"), lax.axis_index("block")
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        first = leaf * length + block * BLOCK
        count = lax.min(length - block * BLOCK, BLOCK)

        def load(row):
            here = lax.min(row, tokens - 1)
            return x_gmem[here, span], dy_gmem[here, span], present_gmem[here]

        def slopes(loaded, before):
            """Of rows: windows, slopes, who follows them, the inputs before the row after them."""
            inputs, windows, ds = [*before], [], []
            for x, dy, bits in loaded:
                inputs.append(x.astype(jnp.float32))
                # Without its newest tap, the row itself, a row is none, and its dy is not read.
                *window, dy = _where_bits(bits, [*inputs[-width:], dy.astype(jnp.float32)], at=0)
                z = _dot(window, taps)
                d = dy * _silu_slope(z, sigmoid(z))
                windows.append(window)
                ds.append(d)
            return windows, ds, tuple(inputs[1 - width :])

        def store(row, bits, ds):
            """dx of `row`, from the slopes of the `width` rows that begin with it."""

            @pl.when(row >= first)
            def _():
                later = _where_bits(bits, [*reversed(ds)], at=width + 1)
                dx_gmem[row, span] = _dot(later, taps).astype(x.dtype)

        def rows(i, carry):
            loaded, before, ahead, ahead_bits, sums = carry
            row = first + i * step
            coming = tuple(load(row + step + k) for k in range(step))
            windows, ds, before = slopes(loaded, before)
            for d, window in zip(ds, windows, strict=True):
                sums = tuple(total + d * value for total, value in zip(sums, window, strict=True))
            ds = [*ahead, *ds]
            bits = [*ahead_bits, *(bits for *_, bits in loaded)]
            for k in range(step):
                store(row - (width - 1) + k, bits[k], ds[k : k + width])
            return coming, before, tuple(ds[step:]), tuple(bits[step:]), sums

        zero = jnp.zeros((slab,), jnp.float32)
        carry = (
            tuple(load(first + k) for k in range(step)),
            _before(x_gmem, first, span, width),
            (zero,) * (width - 1),
            (jnp.int32(0),) * (width - 1),
            (zero,) * width,
        )
        carry = lax.fori_loop(0, lax.div(count, jnp.int32(step)), rows, carry)
        _, before, ahead, ahead_bits, sums = carry
        for j, total in enumerate(sums):
            dw_gmem[leaf * blocks + block, j, span] = total
        after = first + count
        _, ds, _ = slopes([load(after + k) for k in range(width - 1)], before)
        ds = [*ahead, *ds]
        for k in range(width - 1):
            store(after - (width - 1) + k, ahead_bits[k], ds[k : k + width])

    dx, partial = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, channels), x.dtype),
            jax.ShapeDtypeStruct((leaves * blocks, width, channels), jnp.float32),
        ],
        grid=(leaves, blocks, channels // slab),
        grid_names=("leaf", "block", "slab"),
        kernel_name="convolution_backward",
    )(x, w.T, present, dy)
    dw = join_blocks(partial.reshape(leaves * blocks, width * channels), leaves)
    return dx, dw.reshape(leaves, width, channels)
