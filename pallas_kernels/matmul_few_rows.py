"""Dense products of a few rows, over more blocks than the tiles of one alone would make.

A multiprocessor takes in only so many bytes a microsecond, so a product that streams weights past a
few rows is as fast as it has blocks. Three means make more of them, none of which moves a bit:

- `tile.split` blocks, a cluster, share a tile's leaves: each sums its own subtree. Then the tile's
  columns are shared out: a block gets the others' sums of its columns in its shared memory, adds
  them in the tree and stores them. A tile too narrow for that is the first block's as a whole.
- Tiles of 16 or 32 columns, whose weights come in lines of 32 or 64 bytes.
- One launch for several products: a block looks up whose tile it has.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.tuning import MatmulTile


def products(
    lhs: Sequence[Sequence[jax.Array]],
    rhs: Sequence[Sequence[jax.Array]],
    *,
    contractions: Sequence[int],
    tile: MatmulTile,
    out_types: Sequence[jax.ShapeDtypeStruct],
    leaves: int,
    lhs_transposed: bool,
    rhs_transposed: bool,
) -> Sequence[jax.Array]:
    """For every p the sum over i of lhs[p][i] rhs[p][i], in the roles of `wgmma`; one tile a block
    or cluster.

    Args:
      lhs: for every product, or once for all of them, arrays [R_p, K_i] bfloat16, or [K_i, R_p] if
        `lhs_transposed`.
      rhs: likewise arrays [K_i, C_p] bfloat16, or [C_p, K_i] if `rhs_transposed`.
      contractions: the K_i.
      tile: the tile choice, not by turns.
      out_types: the results, [R_p, C_p], or [C_p, R_p] if `tile.swap`, of one dtype.
      leaves: parts of every K_i that are summed apart and combined in a binary tree.
      lhs_transposed, rhs_transposed: as above.

    Returns:
      The results.
    """
    split = min(tile.split, leaves)
    own_leaves, share = leaves // split, _share(tile, split)
    phase_steps = [pl.cdiv(k // leaves, core.TILE_K) for k in contractions]
    phases, results = len(phase_steps), len(out_types)
    sizes = [out.shape[::-1] if tile.swap else out.shape for out in out_types]
    grids = [(pl.cdiv(rows, tile.height), pl.cdiv(cols, tile.cols)) for rows, cols in sizes]
    dtype = out_types[0].dtype

    def body(lhs_gmem, rhs_gmem, outs, smem):
        ring = core.Ring(tile, smem["full"], smem["empty"])
        wg, part = lax.axis_index("wg"), lax.axis_index("part")
        of_tile = functools.partial(_of_tile, lax.axis_index("tile"), grids, tile)

        @pl.when(wg == tile.warpgroups)
        def _producer():
            core.producer_registers(tile.warpgroups)

            @of_tile
            def _load(p, row, col):
                # Rows of the tile that an array of fewer does not have stay as they are in shared
                # memory: what becomes of them is not stored.
                rows = sizes[p][0]
                height = tile.height if lhs_transposed else min(tile.height, rows + -rows % 8)
                a, b = (refs[p % len(refs)] for refs in (lhs_gmem, rhs_gmem))
                sides = (
                    (a, smem["lhs"], pl.ds(row, height), lhs_transposed),
                    (b, smem["rhs"], pl.ds(col, tile.cols), not rhs_transposed),
                )
                first = part * own_leaves
                last = first + own_leaves
                step = core.load_leaves(ring, jnp.int32(0), first, last, phase_steps, sides)
                ring.drain(step)

        @pl.when(wg < tile.warpgroups)
        def _consumer():
            core.consumer_registers(tile.warpgroups)
            first = core.first_row(tile, wg)
            own = pl.ds(first, tile.rows)
            multiply = core.stage_product(smem, own, lhs_transposed, rhs_transposed)
            step = jnp.int32(0)

            def leaf():
                nonlocal step
                shape = (tile.rows, tile.cols)
                (value,), step = ring.consume(step, sum(phase_steps), (shape,), multiply)
                return value

            def store(acc, after):
                @of_tile
                def _store(p, row, col):
                    core.store_tile(
                        (acc,),
                        smem["out"].at[wg],
                        (outs[p],),
                        row + first,
                        col + after,
                        dtype=dtype,
                        transposed=tile.swap,
                    )

                plgpu.wait_smem_to_gmem(0)

            acc = core.leaf_tree(leaf, own_leaves)
            if split == 1:
                store(acc, 0)
            else:
                _join(acc, split, share, part, smem["inbox"].at[wg], smem["arrived"].at[wg], store)

    smem = {
        **_stages(
            tile,
            {"lhs": (tile.height, lhs_transposed), "rhs": (tile.cols, not rhs_transposed)},
        ),
        "out": core.store_buffer(dataclasses.replace(tile, cols=share), dtype),
        **core.Ring.barriers(tile, copies=2),
    }
    if split > 1:
        inbox = (tile.warpgroups, split - 1, tile.rows, share)
        smem["inbox"] = core.swizzled(inbox, jnp.float32)
        smem["arrived"] = plgpu.Barrier(num_arrivals=split - 1, num_barriers=tile.warpgroups)

    def entry(*refs):
        operands, outs = _by(phases, refs[:-results]), refs[-results:]
        run = functools.partial(body, operands[: len(lhs)], operands[len(lhs) :], outs)
        pl.run_scoped(run, smem=smem, collective_axes="wg")

    return plgpu.kernel(
        entry,
        out_type=list(out_types),
        grid=(sum(math.prod(grid) for grid in grids),),
        grid_names=("tile",),
        cluster=(split,),
        cluster_names=("part",),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        kernel_name="matmul_few_rows",
    )(*itertools.chain(*lhs, *rhs))


def _by(count: int, items: Sequence) -> list[Sequence]:
    """Runs of `count` items."""
    return [items[i : i + count] for i in range(0, len(items), count)]


def _of_tile(index, grids: Sequence[tuple[int, int]], tile: MatmulTile, visit: Callable) -> None:
    """`visit(p, row, col)` for the product `p` and the place in it of tile `index` of them all.

    A chain of branches, since operands and results are chosen when the kernel is compiled.
    """
    first = 0
    for p, (row_tiles, col_tiles) in enumerate(grids):

        def go(p=p, first=first, across=col_tiles):
            row, col = (op(index - first, jnp.int32(across)) for op in (lax.div, lax.rem))
            visit(p, row * tile.height, col * tile.cols)

        after = first + row_tiles * col_tiles
        if len(grids) == 1:
            go()
        else:
            pl.when(jnp.logical_and(index >= first, index < after))(go)
        first = after


def _share(tile: MatmulTile, split: int) -> int:
    """Columns of a tile whose sums one block of the cluster joins."""
    return tile.cols if tile.cols % (8 * split) else tile.cols // split


def _join(acc, split: int, share: int, part, inbox, arrived, store: Callable) -> None:
    """Add the cluster's sums of subtrees in the tree and `store` the totals.

    Args:
      acc: float32 [rows, cols], the sum of this block, the `part`-th of `split`.
      share: columns of a block: block i has those from i * share on, if there are any.
      inbox: shared memory [split - 1, rows, share] float32: what the other blocks send to this one.
      arrived: barrier of that, one arrival a sum.
      store: `store(total, first)` takes the total of the columns from `first` on.
    """
    owners = acc.shape[1] // share

    def columns(owner):
        return acc[:, owner * share : (owner + 1) * share]

    for owner in range(owners):

        @pl.when(part != owner)
        def _send(owner=owner):
            plgpu.async_store_smem(
                columns(owner),
                inbox.at[part - (part > owner).astype(jnp.int32)],
                arrived,
                cluster_idx=jnp.int32(owner),
                cluster_dim="part",
                optimized=False,
            )

    for owner in range(owners):

        @pl.when(part == owner)
        def _receive(owner=owner):
            plgpu.barrier_wait(arrived)
            parts = iter(range(split))

            def next_sum():
                i = next(parts)
                if i == owner:
                    return columns(owner)
                sent = inbox.at[i - (i > owner)]
                return plgpu.load(sent, layout=plgpu.Layout.WGMMA, optimized=False)

            store(core.leaf_tree(next_sum, split), owner * share)


def shared_bytes(tile: MatmulTile, leaves: int, out_dtype: jax.typing.DTypeLike) -> int:
    """Shared memory that a block takes, but for its barriers."""
    split = min(tile.split, leaves)
    share = _share(tile, split)
    rest = (tile.cols - share) * core.TILE_K * 2 * tile.stages
    sums = tile.warpgroups * (split - 1) * tile.rows * share * 4
    return core.shared_bytes(dataclasses.replace(tile, cols=share), 1, out_dtype) + rest + sums


def _stages(tile: MatmulTile, spans: dict[str, tuple[int, bool]]) -> dict:
    """The ring's stages by name, from (rows or columns of a tile, whether K is not the line)."""
    shapes = {
        name: (core.TILE_K, span) if k_major else (span, core.TILE_K)
        for name, (span, k_major) in spans.items()
    }
    # Both operands of a `wgmma` have one swizzle, which the narrower line decides.
    swizzle = min(plgpu.find_swizzle(shape[-1] * 16) for shape in shapes.values())
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return {
        name: plgpu.SMEM((tile.stages, *shape), jnp.bfloat16, transforms=transforms)
        for name, shape in shapes.items()
    }
