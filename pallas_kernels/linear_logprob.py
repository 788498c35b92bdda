"""Log-probabilities over a large vocabulary for Hopper, without storing [tokens, vocabulary].

The vocabulary is cut into equal contiguous leaves (a mesh axis may own some of them), a leaf into
blocks of `BLOCK` columns. For a row and a block b, with logits z (float32, the order of `matmul`):

    m_b = max z,    s_b = sum exp(z - m_b)          one fixed reduction inside a warpgroup
    m_l = max_b m_b,    s_l = sum_b s_b exp(m_b - m_l)      blocks of leaf l, upwards
    lse = m + log(sum_l s_l exp(m_l - m)),  m = max_l m_l   leaves in a balanced binary tree

Training takes the block statistics from the product's accumulators; decoding computes the logits
first, keeps them for sampling, and takes the same statistics from the stored values. Both use the
functions below on tiles of the same register layout, so both give the same bits.

Follows the streaming evaluation of softmax of Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), with a fixed tree in place of the running order.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.matmul_product import product
from pallas_kernels.tuning import MatmulTile, logprob_tile

BLOCK = 256  # columns of a block: one wgmma tile, so that a block is reduced inside a warpgroup
ROWS = core.WARPGROUP_ROWS
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def linear_logprob_stats(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    *,
    leaves: int = 1,
    tile: MatmulTile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax statistics of hidden lm_head for every leaf, and the target's logit.

    Args:
      hidden: [M, K] bfloat16.
      lm_head: [K, V] bfloat16, the columns of this rank's leaves.
      targets: [M] int32, columns of `lm_head`; negative or >= V if the target is not among them.
      leaves: leaves of this rank; they divide V into parts of a multiple of 8.
      tile: tile choice; it does not change the result.

    Returns:
      (maximum [leaves, M], sum of exponentials [leaves, M], target logit [M], 0 where the target is
      not here), all float32.

    Raises:
      ValueError: for other dtypes, mismatched shapes or leaves that do not divide the vocabulary.
    """
    m, k, leaf_width, blocks = _check(hidden, lm_head, leaves)
    tile = tile or logprob_tile()
    if tile.swap or tile.cols != BLOCK or tile.rows % ROWS:
        raise ValueError(f"a tile of linear_logprob is 64-row by {BLOCK}, not {tile}")
    padded = m + -m % ROWS
    here = jnp.logical_and(targets >= 0, targets < lm_head.shape[1])
    # Blocks that hold a target of a group of 64 rows, so that others need not look for one.
    place = targets // leaf_width * blocks + targets % leaf_width // BLOCK
    place = jnp.where(here, place, 0).astype(jnp.int32)
    column = jnp.where(here, targets % leaf_width % BLOCK, -1).astype(jnp.int32)
    hits = jnp.zeros((padded // ROWS, leaves * blocks), jnp.int32)
    hits = hits.at[jnp.arange(m) // ROWS, place].max(here.astype(jnp.int32))
    wanted = jnp.where(here, place, -1)
    pad = functools.partial(jnp.pad, pad_width=(0, padded - m), constant_values=-1)

    def epilogue(acc, row, block, _, extras, outs, __):
        hits_gmem, wanted_gmem, column_gmem = extras
        maxima, sums, picked = outs
        for i in range(0, tile.rows, ROWS):
            first = row + i

            @pl.when(first < padded)
            def _rows(i=i, first=first):
                rows = pl.ds(first, ROWS)
                logits = acc[i : i + ROWS]

                @pl.when(hits_gmem[lax.div(first, jnp.int32(ROWS)), block] > 0)
                def _pick():
                    load = functools.partial(plgpu.load, layout=_ROW_LAYOUT, optimized=False)
                    target = jnp.where(
                        load(wanted_gmem.at[rows]) == block, load(column_gmem.at[rows]), -1
                    )
                    picked[block, rows] = _pick_column(logits, target)

                width = leaf_width - lax.rem(block, jnp.int32(blocks)) * BLOCK
                maxima[block, rows], sums[block, rows] = _block_stats(logits, width)

    shape = jax.ShapeDtypeStruct((leaves * blocks, padded), jnp.float32)
    maxima, sums, picked = product(
        core.whole_lines(hidden),
        lm_head,
        (hits, pad(wanted), pad(column)),
        contraction=k,
        rows=m,
        col_tiles=leaves * blocks,
        col_of=functools.partial(_block_start, blocks=blocks, leaf_width=leaf_width),
        tile=tile,
        epilogue=epilogue,
        out_type=[shape, shape, shape],
        smem={},
        name="linear_logprob",
    )
    logit = jnp.where(here, picked[place, jnp.arange(m)], 0.0)
    maximum, total = _combine_blocks(maxima, sums, leaves, blocks)
    return maximum[:, :m], total[:, :m], logit


def logits_stats(logits: jax.Array, *, leaves: int = 1) -> tuple[jax.Array, jax.Array]:
    """The statistics of `linear_logprob_stats` from stored logits, with the same bits.

    Args:
      logits: [M, V] float32, as `matmul(hidden, lm_head, out_dtype=float32)` gives them.
      leaves: leaves of this rank; they divide V into parts of a multiple of 8.

    Returns:
      (maximum [leaves, M], sum of exponentials [leaves, M]), float32.

    Raises:
      ValueError: for another dtype or leaves that do not divide the vocabulary.
    """
    m, v = logits.shape
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, not {logits.dtype}")
    leaf_width, blocks = _leaf_blocks(v, leaves)
    padded = m + -m % ROWS

    def body(logits_gmem, maxima, sums):
        row, block = lax.axis_index("row") * ROWS, lax.axis_index("block")

        def scoped(tile, barrier):
            span = pl.ds(_block_start(block, blocks=blocks, leaf_width=leaf_width), BLOCK)
            plgpu.copy_gmem_to_smem(logits_gmem.at[pl.ds(row, ROWS), span], tile, barrier)
            plgpu.barrier_wait(barrier)
            width = leaf_width - lax.rem(block, jnp.int32(blocks)) * BLOCK
            values = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
            rows = pl.ds(row, ROWS)
            maxima[block, rows], sums[block, rows] = _block_stats(values, width)

        pl.run_scoped(scoped, core.swizzled((ROWS, BLOCK), jnp.float32), plgpu.Barrier())

    shape = jax.ShapeDtypeStruct((leaves * blocks, padded), jnp.float32)
    maxima, sums = plgpu.kernel(
        body,
        out_type=[shape, shape],
        grid=(padded // ROWS, leaves * blocks),
        grid_names=("row", "block"),
        kernel_name="logits_stats",
    )(core.whole_lines(logits))
    maximum, total = _combine_blocks(maxima, sums, leaves, blocks)
    return maximum[:, :m], total[:, :m]


def combine_leaves(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Log-sum-exp of a row from the statistics of all leaves.

    Args:
      maximum, total: [G, M] float32, leaves in order; G a power of two.

    Returns:
      [M] float32.
    """
    leaves, m = maximum.shape
    core.check_leaves(leaves * core.TILE_K, leaves)
    padded = m + -m % _LINE

    def body(maximum_gmem, total_gmem, lse_gmem):
        rows = pl.ds(lax.axis_index("row") * _LINE, _LINE)
        maxima = [maximum_gmem[leaf, rows] for leaf in range(leaves)]
        top = functools.reduce(jnp.maximum, maxima)
        index = iter(range(leaves))

        def leaf():
            i = next(index)
            return total_gmem[i, rows] * jnp.exp(maxima[i] - top)

        lse_gmem[rows] = top + jnp.log(core.leaf_tree(leaf, leaves))

    extra = ((0, 0), (0, padded - m))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((padded,), jnp.float32),
        grid=(padded // _LINE,),
        grid_names=("row",),
        kernel_name="combine_leaves",
    )(jnp.pad(maximum, extra), jnp.pad(total, extra, constant_values=1.0))[:m]


def logit_gradient(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Gradient of grad * log-probability with respect to some columns' logits, recomputed.

        d[r, j] = grad[r] (1[j == targets[r]] - exp(z[r, j] - lse[r]))

    Args:
      hidden: [M, K] bfloat16.
      lm_head: [K, V] bfloat16, the columns.
      targets: [M] int32, a column, or one outside [0, V) if the target is not among them.
      lse: [M] float32, log-sum-exp over the whole vocabulary.
      grad: [M] float32, gradient of the row's log-probability.
      tile: tile choice; it does not change the result.

    Returns:
      [M, V] bfloat16.
    """
    m, k, v, _ = _check(hidden, lm_head, 1)
    tile = tile or logprob_tile()
    extra = (0, -m % (tile.rows * tile.warpgroups))

    def epilogue(acc, row, col_tile, wg, extras, outs, smem):
        rows = pl.ds(row, tile.rows)
        target, lse, grad = (
            plgpu.load(ref.at[rows], layout=_ROW_LAYOUT, optimized=False) for ref in extras
        )

        def spread(x):
            return lax.broadcast_in_dim(x, acc.shape, (0,))

        col = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=plgpu.Layout.WGMMA)
        hit = spread(target - col_tile * tile.cols) == col
        probability = jnp.exp(acc - spread(lse))
        value = spread(grad) * jnp.where(hit, 1.0 - probability, -probability)
        core.store_tile(
            value.astype(jnp.bfloat16),
            smem["out"].at[wg],
            outs[0],
            row,
            col_tile * tile.cols,
            transposed=False,
        )

    (out,) = product(
        core.whole_lines(hidden),
        lm_head,
        (jnp.pad(targets, extra, constant_values=-1), jnp.pad(lse, extra), jnp.pad(grad, extra)),
        contraction=k,
        rows=m,
        col_tiles=pl.cdiv(v, tile.cols),
        col_of=lambda c: c * tile.cols,
        tile=tile,
        epilogue=epilogue,
        out_type=[jax.ShapeDtypeStruct((core.whole_rows(m), v), jnp.bfloat16)],
        smem={"out": core.store_buffer(tile, jnp.bfloat16)},
        name="logit_gradient",
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


def _block_start(block, *, blocks: int, leaf_width: int):
    start = (
        lax.div(block, jnp.int32(blocks)) * leaf_width + lax.rem(block, jnp.int32(blocks)) * BLOCK
    )
    return pl.multiple_of(start, 8)


def _block_stats(logits, width):
    """Maximum and sum of exponentials over the first `width` columns of a [64, BLOCK] tile."""
    col = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    logits = jnp.where(col < width, logits, -jnp.inf)
    maximum = jnp.max(logits, axis=1)
    return maximum, jnp.sum(
        jnp.exp(logits - lax.broadcast_in_dim(maximum, logits.shape, (0,))), axis=1
    )


def _pick_column(logits, column):
    """logits[r, column[r]], or zero if the column is negative: a sum of one value and zeros."""
    col = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    hit = lax.broadcast_in_dim(column, logits.shape, (0,)) == col
    return jnp.sum(jnp.where(hit, logits, 0.0), axis=1)


def _combine_blocks(maxima, sums, leaves: int, blocks: int):
    """[leaves * blocks, rows] block statistics to [leaves, rows]."""
    rows = maxima.shape[1]
    padded = rows + -rows % _LINE

    def body(maxima_gmem, sums_gmem, maximum_gmem, total_gmem):
        leaf, span = lax.axis_index("leaf"), pl.ds(lax.axis_index("row") * _LINE, _LINE)

        def over_blocks(step, value):
            unroll = 8
            whole = blocks // unroll * unroll

            def several(i, value):
                for j in range(unroll):
                    value = step(leaf * blocks + i * unroll + j, value)
                return value

            value = lax.fori_loop(0, blocks // unroll, several, value)
            for j in range(whole, blocks):
                value = step(leaf * blocks + j, value)
            return value

        top = over_blocks(
            lambda b, top: jnp.maximum(top, maxima_gmem[b, span]),
            jnp.full((_LINE,), -jnp.inf, jnp.float32),
        )
        total = over_blocks(
            lambda b, total: total + sums_gmem[b, span] * jnp.exp(maxima_gmem[b, span] - top),
            jnp.zeros((_LINE,), jnp.float32),
        )
        maximum_gmem[leaf, span], total_gmem[leaf, span] = top, total

    shape = jax.ShapeDtypeStruct((leaves, padded), jnp.float32)
    extra = ((0, 0), (0, padded - rows))
    return plgpu.kernel(
        body,
        out_type=[shape, shape],
        grid=(leaves, padded // _LINE),
        grid_names=("leaf", "row"),
        kernel_name="combine_blocks",
    )(jnp.pad(maxima, extra), jnp.pad(sums, extra))
