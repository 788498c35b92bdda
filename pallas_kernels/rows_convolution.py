"""Causal depthwise convolution over ragged sequences, followed by silu, and its backward.

    out[t, c] = silu( sum over taps j, by halving, of w[c, j] input(t - width + 1 + j, c) )

Where a tap's input lies is given as integers: its row of `x`, a row of the cached state, or nowhere
(before the sequence: zero). Arithmetic is float32 with one rounding of a result.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves
from pallas_kernels.rows import NO_BARRIERS, sigmoid, thread_vectors
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


def convolution(
    x: jax.Array,
    w: jax.Array,
    state: jax.Array,
    source: jax.Array,
    first: jax.typing.ArrayLike = 0,
) -> jax.Array:
    """The convolution of every row.

    Args:
      x: [T, C] bfloat16, whose products with taps are exact in float32; C a multiple of 128.
      w: [C, width] bfloat16.
      state: [S, all channels] of x's dtype, rows of cached inputs.
      source: [T, width] int32, oldest tap first: where tap j of row t lies. It is row
        t - width + 1 + j of x if that is what stands here; NOWHERE is zero, and i < NOWHERE is row
        -2 - i of `state`.
      first: int32, the channel of `state` that is x's first, a multiple of 128.

    Returns:
      [T, C] of x's dtype.

    Raises:
      ValueError: if C is not a multiple of 128.
    """
    tokens, channels = x.shape
    width, slab = w.shape[1], SLAB * thread_vectors(channels, _CHANNELS)
    step, block_rows = (math.gcd(tokens, _STEP), _ROWS) if tokens >= _MANY else (1, 1)
    # Of the rows of a step: whether all their taps are rows of x.
    plain = jnp.all(source.reshape(-1, step * width) >= 0, axis=1).astype(jnp.int32)

    def body(x_gmem, w_gmem, state_gmem, source_gmem, plain_gmem, first_gmem, out_gmem):
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        first = lax.axis_index("block") * block_rows
        cached = pl.ds(pl.multiple_of(first_gmem[0], SLAB) + span.start, slab)

        def load(row):
            here = lax.min(row, tokens - step)
            x = x_gmem.at[pl.ds(here, step)]
            return [x[k, span] for k in range(step)], plain_gmem[lax.div(here, jnp.int32(step))]

        def tap(row, j):
            # Both places are read, so that no load waits for a branch: rows of a step follow.
            source = source_gmem[row, j]
            old = state_gmem[lax.max(-2 - source, 0), cached]
            new = x_gmem[lax.max(source, 0), span]
            value = jnp.where(lax.broadcast(source, new.shape) < NOWHERE, old, new)
            return _if(source + 1, value.astype(jnp.float32))

        def finish(out, k, window):
            z = _dot(window, taps)
            out[k, span] = (z * sigmoid(z)).astype(out.dtype)

        def rows(i, carry):
            (loaded, plain), before = carry
            row = first + i * step
            coming = load(row + step)
            inputs = [*before, *(x.astype(jnp.float32) for x in loaded)]

            def inside():
                out = out_gmem.at[pl.ds(row, step)]
                for k in range(step):
                    finish(out, k, inputs[k : k + width])

            def border():
                def one(row, _):
                    finish(out_gmem, row, [tap(row, j) for j in range(width)])

                lax.fori_loop(row, row + step, one, None)

            lax.cond(plain > 0, inside, border)
            return coming, tuple(inputs[step:])

        carry = load(first), _before(x_gmem, first, span, width)
        count = lax.min(tokens - first, block_rows)
        lax.fori_loop(0, lax.div(count, jnp.int32(step)), rows, carry)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid=(pl.cdiv(tokens, block_rows), channels // slab),
        grid_names=("block", "slab"),
        kernel_name="convolution",
        compiler_params=NO_BARRIERS,
    )(x, w.T, state, source, plain, jnp.reshape(first, (1,)).astype(jnp.int32))


_MANY = 2048  # rows from which on there are blocks enough for several rows each
_ROWS = 16  # then; they share one load of the weights and of the rows before them
# Rows of a step: written out side by side, so that what rows share need not move from register to
# register at each of them. The next step's are on their way in the meantime. Channels of a thread:
# registers bound how many blocks there can be.
_STEP, _CHANNELS = 8, 4
_BACKWARD_STEP, _BACKWARD_CHANNELS = 4, 4


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


def _where_bits(bits, values, at: int) -> list[jax.Array]:
    """values[j], or zero if bit `at + j` is not set."""
    return [_if(bits & (1 << at + j), value) for j, value in enumerate(values)]


def convolution_step(
    xs: Sequence[jax.Array],
    w: jax.Array,
    state,
    layer: jax.Array,
    slot: jax.Array,
    known: jax.Array,
) -> list[jax.Array]:
    """The convolution of rows that are a sequence's one new token each, and the next state.

    The bits are those of `convolution`: products of two bfloat16 are exact, and the sums are its.

    Args:
      xs: [T, C_i] bfloat16, groups of channels, C_i multiples of 128.
      w: [C, width] bfloat16, C the sum of C_i.
      state: reference [L, slots, width - 1, C] of their dtype: the last inputs of the
        sequence in a slot, oldest first. They move on by one; zeros stand for those before the
        sequence.
      layer: int32, the entry of `state`.
      slot: [T] int32, the slot of the row's sequence, another one for every row that has one.
      known: [T] int32, how many of the cached inputs are the sequence's; negative for a row that
        is no token: its result is 0 and its slot stays as it is.

    Returns:
      [T, C_i] of their dtype.

    Raises:
      ValueError: if a C_i is not a multiple of 128.
    """
    tokens, width = xs[0].shape[0], w.shape[1]
    slab = SLAB * min(thread_vectors(x.shape[1], _CHANNELS) for x in xs)
    bounds = [0, *itertools.accumulate(x.shape[1] // slab for x in xs)]

    def body(*refs):
        x_gmem, refs = refs[: len(xs)], refs[len(xs) :]
        w_gmem, layer_gmem, slot_gmem, known_gmem, state_gmem, *out_gmem = refs
        row, index = lax.axis_index("row"), lax.axis_index("slab")
        own = pl.ds(index * slab, slab)
        known = known_gmem[row]
        held = state_gmem.at[layer_gmem[0], slot_gmem[row]]

        def compute(x, out, span):
            @pl.when(known < 0)
            def _nothing():
                out[row, span] = jnp.zeros((slab,), out.dtype)

            @pl.when(known >= 0)
            def _step():
                window = [
                    _if((known >= width - 1 - j).astype(jnp.int32), held[j, own])
                    for j in range(width - 1)
                ]
                window.append(x[row, span])
                values = [value.astype(jnp.float32) for value in window]
                z = _dot(values, _taps(w_gmem, own, width))
                out[row, span] = (z * sigmoid(z)).astype(out.dtype)
                for j, value in enumerate(window[1:]):
                    held[j, own] = value

        for x, out, (first, after) in zip(
            x_gmem, out_gmem, itertools.pairwise(bounds), strict=True
        ):
            span = pl.ds((index - first) * slab, slab)
            pl.when((index >= first) & (index < after))(functools.partial(compute, x, out, span))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs],
        grid=(bounds[-1], tokens),
        grid_names=("slab", "row"),
        kernel_name="convolution_step",
        compiler_params=NO_BARRIERS,
    )(*xs, w.T, jnp.reshape(layer, (1,)).astype(jnp.int32), slot, known, state)


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
    width, slab = w.shape[1], SLAB * thread_vectors(channels, _BACKWARD_CHANNELS)
    check_leaves(tokens, leaves)
    length = tokens // leaves
    blocks = pl.cdiv(length, BLOCK)
    step = math.gcd(length, _BACKWARD_STEP)
    back = width - 1
    # Bits: which taps of the row read anything, and as which taps it is read.
    places = jnp.concatenate([source, follower], axis=1) != NOWHERE
    bits = 1 << jnp.arange(places.shape[1], dtype=jnp.int32)
    present = jnp.sum(jnp.where(places, bits, 0), axis=1, dtype=jnp.int32)
    # Of a step: whether its rows miss no tap, and the rows `back` before them, whose gradient it
    # finishes, no follower.
    whole = jnp.all(places[:, :width], axis=1)
    read = jnp.pad(jnp.all(places[:, width:], axis=1), (back, 0))[:tokens]
    steady = jnp.all((whole & read).reshape(-1, step), axis=1).astype(jnp.int32)

    def body(x_gmem, w_gmem, present_gmem, steady_gmem, dy_gmem, dx_gmem, dw_gmem):
        leaf, block = lax.axis_index("leaf"), lax.axis_index("block")
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        taps = _taps(w_gmem, span, width)
        first = leaf * length + block * BLOCK
        after = first + lax.min(length - block * BLOCK, BLOCK)

        def load(row):
            here = lax.min(row, tokens - step)
            x, dy = (ref.at[pl.ds(here, step)] for ref in (x_gmem, dy_gmem))
            pairs = [(x[k, span], dy[k, span]) for k in range(step)]
            return pairs, steady_gmem[lax.div(here, jnp.int32(step))]

        def slope(window, dy):
            z = _dot(window, taps)
            return dy * _silu_slope(z, sigmoid(z))

        def add(sums, d, window):
            return tuple(total + d * value for total, value in zip(sums, window, strict=True))

        def finish(dx, k, ds):
            """Row k of `dx`, from the slopes of the rows whose taps read it, oldest tap first.

            One product joins the sum at a time. A compiler fuses a product with the addition behind
            it; of two rounded products it would choose one, here so and there otherwise.
            """
            total = jnp.zeros((slab,), jnp.float32)
            for d, tap in zip(ds, taps, strict=True):
                total = total + d * tap
            dx[k, span] = total.astype(dx.dtype)

        def rows(i, carry):
            (loaded, steady), before, ahead, sums = carry
            row = first + i * step
            coming = load(row + step)
            inputs = [*before, *(x.astype(jnp.float32) for x, _ in loaded)]
            dys = [dy.astype(jnp.float32) for _, dy in loaded]

            def inside():
                ds, total = [*ahead], sums
                dx = dx_gmem.at[pl.ds(row - back, step)]
                for k, dy in enumerate(dys):
                    window = inputs[k : k + width]
                    ds.append(slope(window, dy))
                    total = add(total, ds[-1], window)
                    finish(dx, k, ds[: -1 - width : -1])
                return tuple(ds[step:]), total

            def border():
                def one(here, carry):
                    before, ahead, sums = carry
                    own = lax.min(here, tokens - 1)
                    inputs = [*before, x_gmem[own, span].astype(jnp.float32)]
                    bits = present_gmem[own]
                    window = _where_bits(bits, inputs, at=0)
                    # Without its newest tap, the row itself, a row is none: its dy is not read.
                    dy = _if(bits & 1 << back, dy_gmem[own, span].astype(jnp.float32))
                    ds = [*ahead, slope(window, dy)]
                    sums = lax.cond(here < after, lambda: add(sums, ds[-1], window), lambda: sums)
                    there = here - back

                    @pl.when((there >= first) & (there < after))
                    def _():
                        later = _where_bits(present_gmem[there], ds[::-1], at=width)
                        finish(dx_gmem, there, later)

                    return tuple(inputs[1:]), tuple(ds[1:]), sums

                carry = before, ahead, sums
                return lax.fori_loop(row, row + step, one, carry)[1:]

            within = (row - back >= first) & (row + step <= after)
            ahead, sums = lax.cond(within & (steady > 0), inside, border)
            return coming, tuple(inputs[step:]), ahead, sums

        zero = jnp.zeros((slab,), jnp.float32)
        carry = (
            load(first),
            _before(x_gmem, first, span, width),
            (zero,) * back,
            (zero,) * width,
        )
        steps = lax.div(after - first + back + step - 1, jnp.int32(step))
        *_, sums = lax.fori_loop(0, steps, rows, carry)
        for j, total in enumerate(sums):
            dw_gmem[leaf * blocks + block, j, span] = total

    dx, partial = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, channels), x.dtype),
            jax.ShapeDtypeStruct((leaves * blocks, width, channels), jnp.float32),
        ],
        grid=(leaves, blocks, channels // slab),
        grid_names=("leaf", "block", "slab"),
        kernel_name="convolution_backward",
        compiler_params=NO_BARRIERS,
    )(x, w.T, present, steady, dy)
    dw = join_blocks(partial.reshape(leaves * blocks, width * channels), leaves)
    return dx, dw.reshape(leaves, width, channels)
