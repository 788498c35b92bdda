"""Log-probabilities over a large vocabulary for Hopper, without storing [tokens, vocabulary].

The vocabulary is cut into equal contiguous leaves (a mesh axis may own some of them), a leaf into
blocks of `BLOCK` columns. For a row and a block b, with z = logit * inverse temperature (logits in
float32 and in the order of `matmul`; z is rounded), and for the kept set {z >= threshold} too:

    m_b = max z,    s_b = sum exp(z - m_b)          one fixed reduction inside a warpgroup
    m_l = max_b m_b,    s_l = sum_b s_b exp(m_b - m_l)      blocks of leaf l, upwards
    m = max_l m_l,    s = sum_l s_l exp(m_l - m)      leaves in a balanced binary tree
    log-probability = (z_target - m) - log s

Training takes the block statistics from the product's accumulators; decoding computes the logits
first, keeps them for sampling, and takes the same statistics from the stored values. Both use the
functions below on tiles of the same register layout, so both give the same bits.

Follows the streaming evaluation of softmax of Milakov and Gimelshein, arXiv 1805.02867, with a
fixed tree in place of the running order.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.matmul_product import product
from pallas_kernels.tuning import MatmulTile, logit_gradient_tile, logprob_tile

BLOCK = 256  # columns of a block: one wgmma tile, so that a block is reduced inside a warpgroup
ROWS = core.WARPGROUP_ROWS
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


class Statistics(NamedTuple):
    """Softmax statistics, float32: maximum, sum of exp(z - maximum), the kept set's part of it."""

    maximum: jax.Array
    total: jax.Array
    kept: jax.Array


def linear_logprob_stats(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    threshold: jax.Array | None = None,
    *,
    leaves: int = 1,
    tile: MatmulTile | None = None,
) -> tuple[Statistics, jax.Array]:
    """Softmax statistics of hidden lm_head for every leaf, and the target's scaled logit.

    Args:
      hidden: [M, K] bfloat16.
      lm_head: [K, V] bfloat16, the columns of this rank's leaves.
      targets: [M] int32, columns of `lm_head`; negative or >= V if the target is not among them.
      inverse_temperature: [M] float32.
      threshold: [M] float32; without it everything is kept and `kept` is `total`.
      leaves: leaves of this rank; they divide V into parts of a multiple of 8.
      tile: tile choice; it does not change the result.

    Returns:
      (Statistics of [leaves, M], scaled logit of the target [M] float32, -inf if it is not here).

    Raises:
      ValueError: for other dtypes, mismatched shapes or leaves that do not divide the vocabulary.
    """
    m, k, leaf_width, blocks = _check(hidden, lm_head, leaves)
    tile = tile or logprob_tile()
    if tile.swap or tile.cols != BLOCK or tile.rows % ROWS:
        raise ValueError(f"a tile of linear_logprob is 64-row by {BLOCK}, not {tile}")
    padded = m + -m % ROWS
    here = jnp.logical_and(targets >= 0, targets < lm_head.shape[1])
    place = targets // leaf_width * blocks + targets % leaf_width // BLOCK
    place = jnp.where(here, place, 0).astype(jnp.int32)
    column = jnp.where(here, targets % leaf_width % BLOCK, -1).astype(jnp.int32)
    wanted = jnp.where(here, place, -1)
    hits = _target_blocks(here, place, padded, leaves * blocks)

    def epilogue(acc, row, block, _, extras, outs, __):
        hits_gmem, wanted_gmem, column_gmem, inverse_gmem, *threshold_gmem = extras
        *stats, picked = outs
        for i in range(0, tile.rows, ROWS):
            first = row + i

            @pl.when(first < padded)
            def _rows(i=i, first=first):
                rows = pl.ds(first, ROWS)
                z = _scale(acc[i : i + ROWS], _load_rows(inverse_gmem, rows))

                @pl.when(hits_gmem[lax.div(first, jnp.int32(ROWS)), block] > 0)
                def _pick():
                    mine = _load_rows(wanted_gmem, rows) == block
                    target = jnp.where(mine, _load_rows(column_gmem, rows), -1)
                    picked[block, rows] = _pick_column(z, target)

                width = leaf_width - lax.rem(block, jnp.int32(blocks)) * BLOCK
                values = _block_stats(z, width, *(_load_rows(t, rows) for t in threshold_gmem))
                for ref, value in zip(stats, values, strict=True):
                    ref[block, rows] = value

    thresholds = () if threshold is None else (threshold,)
    extra = (0, padded - m)
    shape = jax.ShapeDtypeStruct((leaves * blocks, padded), jnp.float32)
    *stats, picked = product(
        (core.whole_lines(hidden),),
        (lm_head,),
        (
            hits,
            jnp.pad(wanted, extra, constant_values=-1),
            jnp.pad(column, extra, constant_values=-1),
            *(jnp.pad(x, extra) for x in (inverse_temperature, *thresholds)),
        ),
        contractions=(k,),
        rows=m,
        col_tiles=leaves * blocks,
        col_of=functools.partial(_block_start, blocks=blocks, leaf_width=leaf_width),
        tile=tile,
        epilogue=epilogue,
        out_type=[shape] * (3 + len(thresholds)),
        out_dtype=None,
        name="linear_logprob",
    )
    logit = jnp.where(here, picked[place, jnp.arange(m)], -jnp.inf)
    return _combine_blocks(stats, m, leaves, blocks), logit


def logits_stats(
    z: jax.Array, threshold: jax.Array | None = None, *, leaves: int = 1
) -> Statistics:
    """The statistics of `linear_logprob_stats` from stored scaled logits, with the same bits.

    Args:
      z: [M, V] float32: `matmul(hidden, lm_head, out_dtype=float32)` times inverse temperature.
      threshold: [M] float32; without it everything is kept.
      leaves: leaves of this rank; they divide V into parts of a multiple of 8.

    Returns:
      Statistics of [leaves, M].

    Raises:
      ValueError: for another dtype or leaves that do not divide the vocabulary.
    """
    m, v = z.shape
    if z.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, not {z.dtype}")
    leaf_width, blocks = _leaf_blocks(v, leaves)
    padded = m + -m % ROWS

    thresholds = () if threshold is None else (threshold,)

    def body(z_gmem, *refs):
        threshold_gmem, stats = refs[: len(thresholds)], refs[len(thresholds) :]
        row, block = lax.axis_index("row") * ROWS, lax.axis_index("block")
        rows = pl.ds(row, ROWS)

        def scoped(tile, barrier):
            span = pl.ds(_block_start(block, blocks=blocks, leaf_width=leaf_width), BLOCK)
            plgpu.copy_gmem_to_smem(z_gmem.at[rows, span], tile, barrier)
            plgpu.barrier_wait(barrier)
            width = leaf_width - lax.rem(block, jnp.int32(blocks)) * BLOCK
            values = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
            values = _block_stats(values, width, *(_load_rows(t, rows) for t in threshold_gmem))
            for ref, value in zip(stats, values, strict=True):
                ref[block, rows] = value

        pl.run_scoped(scoped, core.swizzled((ROWS, BLOCK), jnp.float32), plgpu.Barrier())

    shape = jax.ShapeDtypeStruct((leaves * blocks, padded), jnp.float32)
    stats = plgpu.kernel(
        body,
        out_type=[shape] * (2 + len(thresholds)),
        grid=(padded // ROWS, leaves * blocks),
        grid_names=("row", "block"),
        kernel_name="logits_stats",
    )(core.whole_lines(z), *(jnp.pad(t, (0, padded - m)) for t in thresholds))
    return _combine_blocks(stats, m, leaves, blocks)


class Logprobs(NamedTuple):
    """Of a row: log-probability and log-sum-exp, over the vocabulary and over the kept set."""

    full: jax.Array
    kept: jax.Array
    lse: jax.Array
    lse_kept: jax.Array


def combine_leaves(stats: Statistics, logit: jax.Array) -> Logprobs:
    """Finish the tree over leaves.

    Args:
      stats: Statistics of [G, M], all leaves in order; G a power of two.
      logit: [M] float32, the target's scaled logit.

    Returns:
      Logprobs of [M] float32.
    """
    leaves, m = stats.maximum.shape
    core.check_leaves(leaves, leaves)
    padded = m + -m % _LINE

    def body(maximum_gmem, total_gmem, kept_gmem, logit_gmem, *outs):
        rows = pl.ds(lax.axis_index("row") * _LINE, _LINE)
        maxima = [maximum_gmem[leaf, rows] for leaf in range(leaves)]
        top = functools.reduce(jnp.maximum, maxima)

        def log_sum(sums_gmem):
            index = iter(range(leaves))

            def leaf():
                i = next(index)
                return sums_gmem[i, rows] * jnp.exp(maxima[i] - top)

            return jnp.log(core.leaf_tree(leaf, leaves))

        z = logit_gmem[rows] - top
        log_total, log_kept = log_sum(total_gmem), log_sum(kept_gmem)
        values = Logprobs(z - log_total, z - log_kept, top + log_total, top + log_kept)
        for ref, value in zip(outs, values, strict=True):
            ref[rows] = value

    extra = ((0, 0), (0, padded - m))
    outs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((padded,), jnp.float32)] * 4,
        grid=(padded // _LINE,),
        grid_names=("row",),
        kernel_name="combine_leaves",
    )(*(jnp.pad(x, extra) for x in stats), jnp.pad(logit, extra[1]))
    return Logprobs(*(out[:m] for out in outs))


class Gradients(NamedTuple):
    """What the gradient of a row's logits depends on, [M] float32 each.

    lse, grad: log-sum-exp over the vocabulary, and the gradient by the full log-probability.
    kept: threshold, log-sum-exp of the kept set and gradient by the kept log-probability, or None.
    """

    lse: jax.Array
    grad: jax.Array
    kept: tuple[jax.Array, jax.Array, jax.Array] | None = None


def logit_gradient(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    gradients: Gradients,
    *,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Gradient with respect to some columns' logits, which are recomputed.

        d[r, j] = exp(z - lse[r]) w[r, j] + hit g[r]
        w[r, j] = -inverse_temperature[r] (
                      grad[r] + [z >= threshold[r]] grad_kept[r] exp(lse[r] - lse_kept[r]))
        g[r] = inverse_temperature[r] (grad[r] + grad_kept[r]);    hit = 1 if j == targets[r] else 0

    The kept set's probability is the full one times a row's factor, so an element takes one
    exponential: a power of two by the special function unit, whose error of some 2^-22 vanishes in
    the rounding to bfloat16.

    Args:
      hidden: [M, K] bfloat16.
      lm_head: [K, V] bfloat16, the columns.
      targets: [M] int32, a column, or one outside [0, V) if the target is not among them.
      inverse_temperature: [M] float32.
      gradients: of all rows.
      tile: tile choice; it does not change the result.

    Returns:
      [M, V] bfloat16.
    """
    m, k, v, _ = _check(hidden, lm_head, 1)
    tile = tile or logit_gradient_tile()
    # A row's factors are multiplied out beforehand: the tile has little time for arithmetic.
    grad, base_two = gradients.grad * inverse_temperature, math.log2(math.e)
    vectors = [inverse_temperature, gradients.lse * base_two, -grad]
    if gradients.kept is not None:
        threshold, lse_kept, grad_kept = gradients.kept
        grad_kept = grad_kept * inverse_temperature
        vectors += [threshold, -grad - grad_kept * jnp.exp(gradients.lse - lse_kept)]
        grad = grad + grad_kept
    padded, col_tiles = m + -m % tile.height, pl.cdiv(v, tile.cols)
    here = jnp.logical_and(targets >= 0, targets < v)
    hits = _target_blocks(here, targets // tile.cols, padded, col_tiles)

    def epilogue(acc, row, col_tile, wg, extras, outs, smem):
        hits_gmem, *row_gmem = extras
        first_col = col_tile * tile.cols
        loaded = {}

        def chunk(accs, i, j):
            (z,) = accs
            if i not in loaded:
                rows = pl.ds(row + i, ROWS)
                hit = hits_gmem[lax.div(row + i, jnp.int32(ROWS)), col_tile] > 0
                loaded[i] = hit, [_load_rows(ref, rows) for ref in row_gmem]
            hit, (target, at_target, inverse, lse, factor, *kept) = loaded[i]
            z = _scale(z, inverse)
            p = jnp.exp2(z * base_two - _spread(lse, z))
            w = _spread(factor, z)
            if kept:
                threshold, factor_kept = kept
                w = jnp.where(z >= _spread(threshold, z), _spread(factor_kept, z), w)
            d = lax.optimization_barrier(p * w)  # rounded, whether or not something is added

            def add_target(d):
                column = plgpu.broadcasted_iota(jnp.int32, d.shape, 1, layout=plgpu.Layout.WGMMA)
                hit = _spread(target - (first_col + j), d) == column
                return jnp.where(hit, d + _spread(at_target, d), d)

            return (lax.cond(hit, add_target, lambda d: d, d),)

        core.store_tile(
            (acc,),
            smem["out"].at[wg],
            outs,
            row,
            first_col,
            dtype=jnp.bfloat16,
            transposed=False,
            epilogue=chunk,
        )

    extra = (0, padded - m)
    (out,) = product(
        (core.whole_lines(hidden),),
        (lm_head,),
        (
            hits,
            jnp.pad(targets, extra, constant_values=-1),
            *(jnp.pad(x, extra) for x in (grad, *vectors)),
        ),
        contractions=(k,),
        rows=m,
        col_tiles=col_tiles,
        col_of=lambda c: c * tile.cols,
        tile=tile,
        epilogue=epilogue,
        out_type=[jax.ShapeDtypeStruct((core.whole_rows(m), v), jnp.bfloat16)],
        out_dtype=jnp.bfloat16,
        name="logit_gradient",
        fast_exp=True,
    )
    return out if out.shape[0] == m else out[:m]


_LINE = 128  # rows of one elementwise step: one a thread


def _leaf_blocks(v: int, leaves: int) -> tuple[int, int]:
    if v % (8 * leaves):
        raise ValueError(
            f"a vocabulary of {v} does not split into {leaves} leaves of a multiple of 8"
        )
    return v // leaves, pl.cdiv(v // leaves, BLOCK)


def _check(hidden, lm_head, leaves):
    if hidden.dtype != jnp.bfloat16 or lm_head.dtype != jnp.bfloat16:
        raise ValueError(f"operands must be bfloat16, not {hidden.dtype} and {lm_head.dtype}")
    if hidden.shape[1] != lm_head.shape[0] or hidden.shape[1] % 8:
        raise ValueError(f"{hidden.shape} by {lm_head.shape}: K must agree, a multiple of 8")
    return *hidden.shape, *_leaf_blocks(lm_head.shape[1], leaves)


def _target_blocks(here, block, rows: int, blocks: int) -> jax.Array:
    """[rows / ROWS, blocks] int32: 1 where one of ROWS rows has its target; others need not look.

    here: [M] whether a row has a target among the columns. block: [M] int32, that of the target.
    """
    hits = jnp.zeros((rows // ROWS, blocks), jnp.int32)
    group = jnp.arange(here.shape[0]) // ROWS
    return hits.at[group, jnp.where(here, block, 0)].max(here.astype(jnp.int32))


def _block_start(block, *, blocks: int, leaf_width: int):
    start = (
        lax.div(block, jnp.int32(blocks)) * leaf_width + lax.rem(block, jnp.int32(blocks)) * BLOCK
    )
    return pl.multiple_of(start, 8)


def _load_rows(ref, rows):
    """One value a row of a 64-row tile, in the layout that a reduction of the tile has."""
    return plgpu.load(ref.at[rows], layout=_ROW_LAYOUT, optimized=False)


def _spread(x, like):
    """[rows] to the shape of `like` [rows, columns]."""
    return lax.broadcast_in_dim(x, like.shape, (0,))


def _scale(logits, inverse_temperature):
    """The rounded product: it must not melt into a later subtraction, since decoding stores it."""
    return lax.optimization_barrier(logits * _spread(inverse_temperature, logits))


def _block_stats(z, width, threshold=None):
    """Statistics of the first `width` columns of a [64, BLOCK] tile; two without a threshold."""
    column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
    z = jnp.where(column < width, z, -jnp.inf)
    maximum = jnp.max(z, axis=1)
    e = jnp.exp(z - _spread(maximum, z))
    total = jnp.sum(e, axis=1)
    if threshold is None:
        return maximum, total
    kept = jnp.where(z >= _spread(threshold, z), e, 0.0)
    return maximum, total, jnp.sum(kept, axis=1)


def _pick_column(z, column):
    """z[r, column[r]], or zero if the column is negative: a sum of one value and zeros."""
    index = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.sum(jnp.where(_spread(column, z) == index, z, 0.0), axis=1)


def _combine_blocks(stats, m: int, leaves: int, blocks: int) -> Statistics:
    """Two or three arrays [leaves * blocks, rows] of block statistics to [leaves, m] of leaves."""
    rows = stats[0].shape[1]
    padded = rows + -rows % _LINE
    sums = len(stats) - 1
    unroll = 8

    def body(maxima_gmem, *refs):
        sum_refs, outs = refs[:sums], refs[sums:]
        leaf, span = lax.axis_index("leaf"), pl.ds(lax.axis_index("row") * _LINE, _LINE)

        def over_blocks(step, value):
            def several(i, value):
                for j in range(unroll):
                    value = step(leaf * blocks + i * unroll + j, value)
                return value

            value = lax.fori_loop(0, blocks // unroll, several, value)
            for j in range(blocks // unroll * unroll, blocks):
                value = step(leaf * blocks + j, value)
            return value

        def add(b, totals):
            shrink = jnp.exp(maxima_gmem[b, span] - top)
            return tuple(t + ref[b, span] * shrink for t, ref in zip(totals, sum_refs, strict=True))

        zero = jnp.zeros((_LINE,), jnp.float32)
        top = over_blocks(lambda b, top: jnp.maximum(top, maxima_gmem[b, span]), zero - jnp.inf)
        for ref, value in zip(outs, (top, *over_blocks(add, (zero,) * sums)), strict=True):
            ref[leaf, span] = value

    extra = ((0, 0), (0, padded - rows))
    outs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((leaves, padded), jnp.float32)] * len(stats),
        grid=(leaves, padded // _LINE),
        grid_names=("leaf", "row"),
        kernel_name="combine_blocks",
    )(*(jnp.pad(x, extra) for x in stats))
    maximum, total, *kept = (out[:, :m] for out in outs)
    return Statistics(maximum, total, kept[0] if kept else total)
