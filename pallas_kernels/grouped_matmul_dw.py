"""Weight gradient of the expert products for Hopper: a contraction over each group's own rows.

    dw[g] = sum over rows r of group g, in order, of x[r]^T dy[r]

A group's rows are in token order. It starts at a multiple of 8 rows, where its sum starts too (one
instruction adds the products of rows 0 to 15 of the group, or 16 to 31, ..., wherever it lies). In
its last block of 64 rows what follows the group is replaced by zeros, in both operands: a stale NaN
times zero is a NaN. Zeros add nothing, so the bits depend on the group's own rows alone.

No mesh axis cuts this sum, since an expert lies on one rank, which sees the tokens of all of them:
it has no leaves.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.grouped_matmul import ROW_ALIGNMENT
from pallas_kernels.tuning import MatmulTile, grouped_dw_tile


def grouped_matmul_dw(
    x: jax.Array,
    dy: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Gradient of `grouped_matmul` with respect to its weights.

    Args:
      x: [R, K] bfloat16, rows sorted by group.
      dy: [R, N] bfloat16.
      starts: [G] int32, first row of every group, a multiple of ROW_ALIGNMENT.
      sizes: [G] int32, rows of every group.
      out_dtype: float32, or bfloat16 (one rounding of the float32 sum).
      tile: tile choice; it does not change the result.

    Returns:
      [G, K, N] of `out_dtype`; zero for a group without rows.

    Raises:
      ValueError: for other dtypes, mismatched shapes, or sides that are not multiples of 8.
    """
    (rows, k), (rows_dy, n) = x.shape, dy.shape
    if x.dtype != jnp.bfloat16 or dy.dtype != jnp.bfloat16:
        raise ValueError(f"operands must be bfloat16, not {x.dtype} and {dy.dtype}")
    if rows != rows_dy or k % 8 or n % 8:
        raise ValueError(f"{x.shape} and {dy.shape}: rows must agree and sides be multiples of 8")
    groups = sizes.shape[0]
    tile = tile or grouped_dw_tile()
    cta_rows = tile.height
    row_tiles, col_tiles = pl.cdiv(k, cta_rows), pl.cdiv(n, tile.cols)
    tiles = groups * row_tiles * col_tiles
    ctas = min(core.sm_count(), tiles)
    share = tile.cols // tile.readers

    def body(x_gmem, dy_gmem, starts_gmem, sizes_gmem, dw_gmem, smem):
        ring = core.Ring(tile, smem["full"], smem["empty"])
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        def blocks(size):
            return lax.max(pl.cdiv(size, core.TILE_K), 1)

        def for_each_tile(visit):
            def at(i, step):
                index = cta + i * ctas
                group, place = (
                    lax.div(index, row_tiles * col_tiles),
                    lax.rem(index, row_tiles * col_tiles),
                )
                row, col = lax.div(place, col_tiles), lax.rem(place, col_tiles)
                return visit(i, group, row * cta_rows, col * tile.cols, step)

            count = lax.div(tiles - cta + ctas - 1, jnp.int32(ctas))
            return lax.fori_loop(0, count, at, jnp.int32(0))

        @pl.when(wg == tile.warpgroups)
        def _producer():
            core.producer_registers(tile.warpgroups)

            def load(i, group, row, col, step):
                turn = ring.of_turn(i)
                start = pl.multiple_of(starts_gmem[group], ROW_ALIGNMENT)

                def issue(i, slot, barrier):
                    span = pl.ds(start + i * core.TILE_K, core.TILE_K)
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[span, pl.ds(row, cta_rows)], smem["lhs"].at[slot], barrier
                    )
                    plgpu.copy_gmem_to_smem(
                        dy_gmem.at[span, pl.ds(col, tile.cols)], smem["rhs"].at[slot], barrier
                    )

                return turn.produce(step, blocks(sizes_gmem[group]), issue)

            ring.drain(for_each_tile(load))

        @pl.when(wg < tile.warpgroups)
        def _consumer():
            core.consumer_registers(tile.warpgroups)
            first = core.first_row(tile, wg)
            own = pl.ds(first, tile.rows)
            mask = pl.ds(0 if tile.turns else wg * share, share)

            def compute(turn, group, size, row, col, step):

                def multiply(i, slot, acc):
                    lhs, rhs = smem["lhs"].at[slot], smem["rhs"].at[slot]
                    left = size - i * core.TILE_K

                    @pl.when(left < core.TILE_K)
                    def _mask():
                        _keep_rows(lhs.at[:, own], left)
                        _keep_rows(rhs.at[:, mask], left)
                        plgpu.commit_smem()
                        if tile.readers > 1:
                            plgpu.barrier_arrive(smem["masked"])
                            plgpu.barrier_wait(smem["masked"])

                    plgpu.wgmma(acc, lhs.at[:, own].T, rhs)

                accs, _ = turn.consume(step, blocks(size), ((tile.rows, tile.cols),), multiply)
                core.store_tile(
                    accs,
                    smem["out"].at[wg],
                    (dw_gmem.at[group],),
                    row + first,
                    col,
                    dtype=out_dtype,
                    transposed=False,
                )

            def visit(i, group, row, col, step):
                size = sizes_gmem[group]
                work = functools.partial(compute, ring.of_turn(i), group, size, row, col, step)
                core.in_turn(tile, wg, i, work)
                return ring.advance(step, blocks(size))

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    smem = {
        "lhs": core.swizzled((tile.stages, core.TILE_K, cta_rows), jnp.bfloat16),
        "rhs": core.swizzled((tile.stages, core.TILE_K, tile.cols), jnp.bfloat16),
        "out": core.store_buffer(tile, out_dtype),
        "masked": plgpu.Barrier(num_arrivals=tile.readers),
        **core.Ring.barriers(tile, copies=2),
    }
    (dw,) = core.launch(
        body,
        [jax.ShapeDtypeStruct((groups, k, n), out_dtype)],
        smem,
        ctas=ctas,
        warpgroups=tile.warpgroups,
        name="grouped_matmul_dw",
    )(x, dy, starts, sizes)
    return dw


def _keep_rows(block, count) -> None:
    """Zero the rows of a shared memory block from `count` on."""
    row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    value = block[...]
    block[...] = jnp.where(row < count, value, jnp.zeros_like(value))
