"""The persistent dense product that `matmul` and `linear_logprob` share: any epilogue on its tiles.

It speaks in the roles of `wgmma`: lhs [R, K] by rhs [K, C], tiles of R (the side of 64) by C (the
side of 8). Who is M and who is N, and what becomes of a tile, is the caller's business.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.tuning import MatmulTile


def product(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    extras: Sequence[jax.Array],
    *,
    contractions: Sequence[int],
    rows: int,
    col_tiles: int,
    col_of: Callable[[jax.Array], jax.Array],
    tile: MatmulTile,
    epilogue: Callable,
    out_type: Sequence[jax.ShapeDtypeStruct],
    out_dtype: jax.typing.DTypeLike | None,
    name: str,
    leaves: int = 1,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    fast_exp: bool = False,
) -> Sequence[jax.Array]:
    """Run `epilogue` on every tile of the sum over i of lhs[i] rhs[i].

    Args:
      lhs: arrays [R, K_i] bfloat16, or [K_i, R] if `lhs_transposed`.
      rhs: arrays [K_i, C] bfloat16, or [C, K_i] if `rhs_transposed`.
      extras: further operands, handed to the epilogue as references.
      contractions: the K_i.
      rows: R.
      col_tiles: number of tiles along C; tile c starts at column `col_of(c)`.
      tile: the tile choice.
      epilogue: `epilogue(acc, row, col_tile, wg, extras, outs, smem)` with acc the float32 tile
        [tile.rows, tile.cols] of one warpgroup and `row` its first row.
      out_type: the outputs.
      out_dtype: dtype of the tiles that the epilogue stores through smem["out"], if it does.
      name: the kernel's name.
      leaves: parts of every K_i that are summed apart and combined in a binary tree; leaf l sums
        its part of K_0, then that of K_1, and so on, in one accumulator.
      lhs_transposed, rhs_transposed: as above.
      fast_exp: exponentials of the epilogue by the special function unit alone.

    Returns:
      The outputs.

    Raises:
      ValueError: if the tile has no room for the sums of the leaves.
    """
    cta_rows = tile.height
    row_tiles = pl.cdiv(rows, cta_rows)
    tiles = row_tiles * col_tiles
    phase_steps = [pl.cdiv(k // leaves, core.TILE_K) for k in contractions]
    phases, steps = len(phase_steps), leaves * sum(phase_steps)
    holds = core.Holds.of(leaves, tile)
    ctas = min(core.sm_count(), tiles)

    def body(*refs, smem):
        smem = holds.open(smem)
        lhs_gmem, rhs_gmem, refs = refs[:phases], refs[phases : 2 * phases], refs[2 * phases :]
        extra_gmem, out_gmem = refs[: len(extras)], refs[len(extras) :]
        ring = core.Ring(tile, smem["full"], smem["empty"])
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        def for_each_tile(visit):
            def at(i, step):
                r, c = plgpu.planar_snake(
                    cta + i * ctas, (row_tiles, col_tiles), tile.minor, tile.band
                )
                return visit(i, r * cta_rows, c, step)

            count = lax.div(tiles - cta + ctas - 1, jnp.int32(ctas))
            return lax.fori_loop(0, count, at, jnp.int32(0))

        @pl.when(wg == tile.warpgroups)
        def _producer():
            core.producer_registers(tile.warpgroups)

            def load(i, row, col_tile, step):
                turn = ring.of_turn(i)
                row_span, col_span = pl.ds(row, cta_rows), pl.ds(col_of(col_tile), tile.cols)
                sides = (
                    (lhs_gmem, smem["lhs"], row_span, lhs_transposed),
                    (rhs_gmem, smem["rhs"], col_span, not rhs_transposed),
                )
                return core.load_leaves(turn, step, 0, leaves, phase_steps, sides)

            ring.drain(for_each_tile(load))

        @pl.when(wg < tile.warpgroups)
        def _consumer():
            core.consumer_registers(tile.warpgroups)
            first = core.first_row(tile, wg)
            own = pl.ds(first, tile.rows)
            multiply = core.stage_product(smem, own, lhs_transposed, rhs_transposed)

            def compute(turn, row, col_tile, step):
                row = row + first

                def leaf():
                    nonlocal step
                    (value,), step = turn.consume(
                        step, sum(phase_steps), ((tile.rows, tile.cols),), multiply
                    )
                    return value

                acc = holds.sum(leaf, smem, wg)
                epilogue(acc, row, col_tile, wg, extra_gmem, out_gmem, smem)

            def visit(i, row, col_tile, step):
                core.in_turn(tile, wg, i, lambda: compute(ring.of_turn(i), row, col_tile, step))
                return ring.advance(step, steps)

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    stages = {
        "lhs": _stages(tile.stages, cta_rows, lhs_transposed),
        "rhs": _stages(tile.stages, tile.cols, not rhs_transposed),
        **core.Ring.barriers(tile, copies=2),
        **({} if out_dtype is None else holds.smem(out_dtype)),
    }
    return core.launch(
        body,
        list(out_type),
        stages,
        ctas=ctas,
        warpgroups=tile.warpgroups,
        name=name,
        fast_exp=fast_exp,
    )(*lhs, *rhs, *extras)


def _stages(count: int, span: int, k_major: bool):
    tile = (core.TILE_K, span) if k_major else (span, core.TILE_K)
    return core.swizzled((count, *tile), jnp.bfloat16)
