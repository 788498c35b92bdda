"""Dense matrix product for Hopper with a declared summation order: bfloat16 in, float32 sums.

    out[m, n] = tree over leaves l of ( sum over k in leaf l, in order, of a[m, k] b[k, n] )

With one leaf it is the column form, for a contraction that no mesh axis cuts. With `leaves` > 1
(a power of two) the contraction is cut into equal contiguous leaves, each summed from zero, and the
leaf sums combine in a balanced binary tree: a rank that owns a subtree calls this with its own
leaves and float32 output, and adding the ranks' results in the same tree gives the same bits.

The three products of a linear layer y = x w are one kernel:
    y  = matmul(x, w)                      contraction over the input features
    dx = matmul(dy, w, transpose_b=True)   contraction over the output features
    dw = matmul(x, dy, transpose_a=True)   contraction over tokens, with batch leaves

An element depends on its own row of `a`, its own column of `b` and `leaves`, on nothing else: not on
M, N, the tile, the row's place, or `swap`, which evaluates out^T = b^T a^T so that a few rows sit in
the 8-wide side of the instruction.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.tuning import MatmulTile, matmul_tile


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    leaves: int = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Product with the summation order of the module's docstring.

    Args:
      a: [M, K] bfloat16, or [K, M] with `transpose_a`.
      b: [K, N] bfloat16, or [N, K] with `transpose_b`.
      leaves: equal parts of K that are summed apart and combined in a binary tree.
      transpose_a, transpose_b: how the operands lie in memory.
      out_dtype: float32, or bfloat16 (one rounding of the float32 sum).
      tile: tile choice; by default the tuning table's. It does not change the result.

    Returns:
      [M, N] of `out_dtype`.

    Raises:
      ValueError: for other dtypes, mismatched shapes, or leaves that are not a power of two of
        whole 64-wide steps of K.
    """
    if a.dtype != jnp.bfloat16 or b.dtype != jnp.bfloat16:
        raise ValueError(f"operands must be bfloat16, not {a.dtype} and {b.dtype}")
    m, k = a.shape[::-1] if transpose_a else a.shape
    k_b, n = b.shape[::-1] if transpose_b else b.shape
    if k != k_b:
        raise ValueError(f"contractions differ: {a.shape} and {b.shape}, {transpose_a=} {transpose_b=}")
    core.check_leaves(k, leaves)
    if tile is None:
        tile = matmul_tile(m, k, n, leaves, out_dtype)
    # TMA wants 16-byte strides and fills what it reads outside an operand with zeros. Zero columns
    # are dropped again, and zero products change no sum.
    a, b = core.pad_to(a, 1, 8), core.pad_to(b, 1, 8)
    padded_n = n + -n % 8
    if tile.swap:
        out = _product(
            b, a, k, (padded_n, m), leaves, not transpose_b, not transpose_a, out_dtype, tile
        )
    else:
        out = _product(a, b, k, (m, padded_n), leaves, transpose_a, transpose_b, out_dtype, tile)
    return out if padded_n == n else out[:, :n]


def _product(lhs, rhs, k, shape, leaves, lhs_transposed, rhs_transposed, out_dtype, tile):
    """lhs rhs in the roles that `wgmma` gives them: [R, K] by [K, C], out [R, C], or [C, R] swapped."""
    rows, cols = shape
    cta_rows = tile.rows * tile.warpgroups
    row_tiles, col_tiles = pl.cdiv(rows, cta_rows), pl.cdiv(cols, tile.cols)
    tiles = row_tiles * col_tiles
    leaf_steps = pl.cdiv(pl.cdiv(k, leaves), core.TILE_K)
    steps = leaf_steps * leaves
    hold = leaves >= tile.hold_from
    ctas = min(core.sm_count(), tiles)

    def body(lhs_gmem, rhs_gmem, out_gmem, smem):
        ring = core.Ring(tile.stages, smem["full"], smem["empty"])
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        def for_each_tile(visit):
            def at(i, step):
                r, c = plgpu.planar_snake(
                    cta + i * ctas, (row_tiles, col_tiles), tile.minor, tile.band
                )
                return visit(r * cta_rows, c * tile.cols, step)

            count = lax.div(tiles - cta + ctas - 1, jnp.int32(ctas))
            return lax.fori_loop(0, count, at, jnp.int32(0))

        @pl.when(wg == tile.warpgroups)
        def _producer():
            core.producer_registers(tile.warpgroups)

            def load(row, col, step):
                def issue(i, slot, barrier):
                    ks = pl.ds(i * core.TILE_K, core.TILE_K)
                    for gmem, stage, start, size, transposed in (
                        (lhs_gmem, smem["lhs"], row, cta_rows, lhs_transposed),
                        (rhs_gmem, smem["rhs"], col, tile.cols, not rhs_transposed),
                    ):
                        span = pl.ds(start, size)
                        src = gmem.at[ks, span] if transposed else gmem.at[span, ks]
                        plgpu.copy_gmem_to_smem(src, stage.at[slot], barrier)

                return ring.produce(step, steps, issue)

            ring.drain(for_each_tile(load))

        @pl.when(wg < tile.warpgroups)
        def _consumer():
            core.consumer_registers(tile.warpgroups)
            own = pl.ds(wg * tile.rows, tile.rows)

            def multiply(slot, acc):
                a = smem["lhs"].at[slot]
                a = a.at[:, own].T if lhs_transposed else a.at[own, :]
                b = smem["rhs"].at[slot]
                plgpu.wgmma(acc, a, b.T if rhs_transposed else b)

            def compute(row, col, step):
                def leaf():
                    nonlocal step
                    (value,), step = ring.consume(
                        step, leaf_steps, ((tile.rows, tile.cols),), multiply
                    )
                    return value

                acc = core.leaf_tree(leaf, leaves, smem["hold"].at[wg] if hold else None)
                core.store_tile(
                    acc.astype(out_dtype),
                    smem["out"].at[wg],
                    out_gmem,
                    row + wg * tile.rows,
                    col,
                    transposed=tile.swap,
                )
                return step

            for_each_tile(compute)
            plgpu.wait_smem_to_gmem(0)

    smem = {
        "lhs": core.swizzled(
            (tile.stages, *_stage(core.TILE_K, cta_rows, lhs_transposed)), jnp.bfloat16
        ),
        "rhs": core.swizzled(
            (tile.stages, *_stage(core.TILE_K, tile.cols, not rhs_transposed)), jnp.bfloat16
        ),
        "out": core.store_buffer(tile.warpgroups, tile.rows, tile.cols, out_dtype, tile.swap),
        **core.Ring.barriers(tile.stages, copies=2, consumers=tile.warpgroups),
    }
    if hold:
        smem["hold"] = core.swizzled((tile.warpgroups, tile.rows, tile.cols), jnp.float32)
    return core.launch(
        body,
        jax.ShapeDtypeStruct((cols, rows) if tile.swap else (rows, cols), out_dtype),
        smem,
        ctas=ctas,
        warpgroups=tile.warpgroups,
        name="matmul",
    )(lhs, rhs)


def _stage(k: int, span: int, k_major: bool) -> tuple[int, int]:
    return (k, span) if k_major else (span, k)
