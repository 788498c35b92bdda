"""Expert matrix products for Hopper: rows sorted by expert, one weight matrix an expert.

Group g is the rows [starts[g], starts[g] + sizes[g]), which are multiplied with weight g. Starts
are multiples of ROW_ALIGNMENT (`aligned_starts` makes them), so a few rows between groups belong to
none. The sizes live on the device: a table of row tiles is made from them with integer operations,
and the kernel walks as many of its entries as there are. A tile lies in one group and writes only
that group's rows.

The order of a row's sum is that of `matmul` in its column form (K upwards, one float32 sum): it
does not depend on the sizes of the groups, the row's place, or the tile. An expert lies whole on
one rank, so no mesh axis cuts these contractions and they have no leaves. Rows of no group are
neither read into a result nor written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul_core as core
from pallas_kernels.rows import sigmoid
from pallas_kernels.tuning import (
    MatmulTile,
    grouped_matmul_tile,
    grouped_swiglu_backward_tile,
    grouped_swiglu_tile,
)


def grouped_matmul(
    x: jax.Array | tuple[jax.Array, ...],
    w: jax.Array | tuple[jax.Array, ...],
    starts: jax.Array,
    sizes: jax.Array,
    *,
    transpose_w: bool = False,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Each row times its group's matrix.

    Args:
      x: [R, K] bfloat16, rows sorted by group; or a tuple of them, whose contractions follow one
        another in the same accumulator (the input gradient of several products of one input).
      w: [G, K, N] bfloat16, or [G, N, K] with `transpose_w`; a tuple beside a tuple of `x`.
      starts: [G] int32, first row of every group, a multiple of ROW_ALIGNMENT, not decreasing.
      sizes: [G] int32, rows of every group.
      transpose_w: contract the last axis of `w`.
      out_dtype: bfloat16 or float32.
      tile: tile choice; by default the tuning table's. It does not change the result.

    Returns:
      [R, N] of `out_dtype`; rows outside every group are left as they were allocated.

    Raises:
      ValueError: for other dtypes, mismatched shapes, or K that is not a multiple of 64.
    """
    xs, ws = (x, w) if isinstance(x, tuple) else ((x,), (w,))
    _check(xs, ws, transpose_w)
    n = ws[0].shape[1] if transpose_w else ws[0].shape[2]
    if tile is None:
        tile = grouped_matmul_tile(xs[0].shape[0], ws[0].shape[0], xs[0].shape[1])
    (out,) = _grouped(xs, ws, starts, sizes, n, 1, transpose_w, out_dtype, 1, None, tile)
    return out


def grouped_swiglu(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    keep: bool = False,
    tile: MatmulTile | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """silu(x gate_g) * (x up_g) of every row: both products in one pass over x, rounded once.

    Args:
      x: [R, K] bfloat16, rows sorted by group.
      gate, up: [G, K, N] bfloat16.
      starts, sizes: [G] int32, as in `grouped_matmul`.
      keep: return both products for `grouped_swiglu_backward` too.
      tile: tile choice; it does not change the result. Its columns (rows if swapped) hold one half.

    Returns:
      [R, N] bfloat16; rows outside every group are left as they were allocated. With `keep` also
      the products in float32, tile by tile in the order of `row_tiles`.

    Raises:
      ValueError: for other dtypes, mismatched shapes, or K that is not a multiple of 64.
    """
    _check((x, x), (gate, up), False)
    n = gate.shape[2]
    if tile is None:
        tile = grouped_swiglu_tile(x.shape[0], gate.shape[0], keep)

    def epilogue(products, *_):
        g, u = products
        return (g * sigmoid(g) * u,)

    hidden, *kept = _grouped(
        *((x,), (gate, up), starts, sizes, n, 2, False, jnp.bfloat16, 1, epilogue, tile),
        keep=keep,
    )
    return (hidden, *kept) if keep else hidden


def grouped_swiglu_backward(
    kept: jax.Array,
    down: jax.Array,
    dy: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    tile: MatmulTile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Through y = swiglu(x) down: gradients of both products.

    Args:
      kept: what `grouped_swiglu` kept, for the same rows and tile.
      down: [G, N, H] bfloat16.
      dy: [R, H] bfloat16.
      starts, sizes: [G] int32, as in `grouped_matmul`.
      tile: tile choice; it does not change the result.

    Returns:
      (gradient of x gate, gradient of x up, hidden), each [R, N] bfloat16, rounded once; rows
      outside every group are left as they were allocated.

    Raises:
      ValueError: for other dtypes, mismatched shapes, or H that is not a multiple of 64.
    """
    _check((dy,), (down,), True)
    rows, (groups, n, _) = dy.shape[0], down.shape
    if tile is None:
        tile = grouped_swiglu_backward_tile(rows, groups)

    def epilogue(products, i, j, kept):
        (dh,) = products
        span = pl.ds(i, dh.shape[0]), pl.ds(j, dh.shape[1])
        g, u = (
            plgpu.load(ref.at[span], layout=plgpu.Layout.WGMMA, optimized=False) for ref in kept
        )
        s = sigmoid(g)
        return dh * u * (s * (1.0 + g * (1.0 - s))), dh * (g * s), g * s * u

    return tuple(
        _grouped(
            *((dy,), (down,), starts, sizes, n, 1, True, jnp.bfloat16, 3, epilogue, tile),
            kept=kept,
        )
    )


def _check(xs, ws, transpose_w):
    for x, w in zip(xs, ws, strict=True):
        if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
            raise ValueError(f"operands must be bfloat16, not {x.dtype} and {w.dtype}")
        k = w.shape[2] if transpose_w else w.shape[1]
        if x.shape[1] != k or x.shape[0] != xs[0].shape[0] or k % core.TILE_K:
            raise ValueError(
                f"{x.shape} by {w.shape} ({transpose_w=}): K must agree, a multiple of 64"
            )


ROW_ALIGNMENT = 8  # a TMA copy in wgmma's layout starts at a multiple of this many rows


def aligned_starts(sizes: jax.Array) -> jax.Array:
    """First rows, multiples of ROW_ALIGNMENT, of consecutive groups of `sizes` [G] int32 rows."""
    room = (sizes + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    return jnp.cumsum(room, dtype=jnp.int32) - room


def row_tiles(
    starts: jax.Array, sizes: jax.Array, rows: int, height: int
) -> tuple[jax.Array, jax.Array]:
    """The tiles of `height` rows that cover all groups, each in one group.

    Args:
      starts, sizes: [G] int32.
      rows: R, the rows there can be at most.
      height: rows of a tile, a multiple of ROW_ALIGNMENT.

    Returns:
      (table [3, tiles] int32: group, first row and number of rows of every tile; count [1] int32).
    """
    groups = sizes.shape[0]
    tiles = (sizes + height - 1) // height
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(rows // height + min(groups, rows), dtype=jnp.int32)
    group = jnp.sum(last <= index[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, groups - 1)
    before = (index - (last - tiles)[group]) * height
    count = jnp.clip(sizes[group] - before, 0, height)
    return jnp.stack([group, starts[group] + before, count]).astype(jnp.int32), last[-1:]


def _grouped(
    xs,
    ws,
    starts,
    sizes,
    n,
    products,
    transpose_w,
    out_dtype,
    results,
    epilogue,
    tile,
    *,
    keep=False,
    kept=None,
):
    """`products` products at once, or one over several contractions, with a common epilogue.

    products == 1: sum over i of xs[i] ws[i]; products == len(ws): xs[0] times every ws[i]. The
    epilogue is `core.store_tile`'s and makes `results` outputs; `keep` adds one, with the products
    themselves. `kept` is such an output: its part that belongs to a tile is handed to the epilogue.
    """
    rows = xs[0].shape[0]
    height, width = (tile.cols, tile.height) if tile.swap else (tile.height, tile.cols)
    feature_tiles = pl.cdiv(n, width)
    table, count = row_tiles(starts, sizes, rows, height)
    capacity = table.shape[1] * feature_tiles
    extras = () if kept is None else (kept,)
    outs = [jax.ShapeDtypeStruct((rows, n), out_dtype)] * results
    if keep:
        shape = (products, capacity, tile.readers, tile.rows, tile.cols)
        outs.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    ctas = min(core.sm_count(), capacity)
    phases = len(xs)
    phase_steps = [x.shape[1] // core.TILE_K for x in xs]
    steps = sum(phase_steps)

    def body(*refs, smem):
        x_gmem, refs = refs[:phases], refs[phases:]
        w_gmem, (table_gmem, count_gmem, *refs) = refs[: len(ws)], refs[len(ws) :]
        extra_gmem, refs = refs[: len(extras)], refs[len(extras) :]
        out_gmem, keep_gmem = refs[:results], refs[results:]
        ring = core.Ring(tile, smem["full"], smem["empty"])
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")
        # Both operands by role: lhs has the side of 64, rhs the side of 8.
        x_stage, w_stage = ("rhs", "lhs") if tile.swap else ("lhs", "rhs")

        def for_each_tile(visit):
            tiles = count_gmem[0] * feature_tiles

            def at(i, step):
                index = cta + i * ctas
                entry, feature = lax.div(index, feature_tiles), lax.rem(index, feature_tiles)
                group, first, size = (table_gmem[j, entry] for j in range(3))
                first = pl.multiple_of(first, ROW_ALIGNMENT)
                return visit((i, index), group, first, size, feature * width, step)

            mine = lax.div(lax.max(tiles - cta + ctas - 1, 0), jnp.int32(ctas))
            return lax.fori_loop(0, mine, at, jnp.int32(0))

        @pl.when(wg == tile.warpgroups)
        def _producer():
            core.producer_registers(tile.warpgroups)

            def load(index, group, first, _, feature, step):
                turn = ring.of_turn(index[0])
                features = pl.ds(feature, width)
                for phase in range(phases):

                    def issue(i, slot, barrier, phase=phase):
                        ks = pl.ds(i * core.TILE_K, core.TILE_K)
                        plgpu.copy_gmem_to_smem(
                            x_gmem[phase].at[pl.ds(first, height), ks],
                            smem[x_stage].at[slot],
                            barrier,
                        )
                        for p in range(products):
                            w = w_gmem[phase if products == 1 else p].at[group]
                            plgpu.copy_gmem_to_smem(
                                w.at[features, ks] if transpose_w else w.at[ks, features],
                                smem[w_stage].at[p, slot],
                                barrier,
                            )

                    step = turn.produce(step, phase_steps[phase], issue)
                return step

            ring.drain(for_each_tile(load))

        @pl.when(wg < tile.warpgroups)
        def _consumer():
            core.consumer_registers(tile.warpgroups)
            part = core.first_row(tile, wg)
            own = pl.ds(part, tile.rows)

            def multiply(_, slot, *accs):
                x = smem[x_stage].at[slot]
                for p, acc in enumerate(accs):
                    w = smem[w_stage].at[p, slot]
                    if tile.swap:
                        w = w.at[own, :] if transpose_w else w.at[:, own].T
                        plgpu.wgmma(acc, w, x.T)
                    else:
                        plgpu.wgmma(acc, x.at[own, :], w.T if transpose_w else w)

            def compute(index, first, valid, feature, step):
                turn, index = ring.of_turn(index[0]), index[1]
                if tile.swap:
                    row, col = feature + part, first
                else:
                    row, col = first + part, feature
                    valid = valid - part

                @pl.when(valid > 0)
                def _product():
                    place = 0 if tile.turns else wg
                    accs, _ = turn.consume(
                        step, steps, ((tile.rows, tile.cols),) * products, multiply
                    )
                    for ref in keep_gmem:
                        for p, acc in enumerate(accs):
                            ref[p, index, place] = acc
                    chunks = epilogue
                    for ref in extra_gmem:
                        tiles = [ref.at[p, index, place] for p in range(ref.shape[0])]
                        chunks = functools.partial(epilogue, kept=tiles)
                    core.store_tile(
                        accs,
                        smem["out"].at[wg],
                        out_gmem,
                        row,
                        col,
                        dtype=out_dtype,
                        transposed=tile.swap,
                        valid=valid,
                        epilogue=chunks,
                    )

                @pl.when(valid <= 0)
                def _nothing():
                    turn.skip(step, steps)

            def visit(index, _, first, valid, feature, step):
                work = functools.partial(compute, index, first, valid, feature, step)
                core.in_turn(tile, wg, index[0], work)
                return ring.advance(step, steps)

            for_each_tile(visit)
            plgpu.wait_smem_to_gmem(0)

    x_tile = (height, core.TILE_K)
    w_tile = (width, core.TILE_K) if transpose_w else (core.TILE_K, width)
    stages = {
        "x": core.swizzled((tile.stages, *x_tile), jnp.bfloat16),
        "w": core.swizzled((products, tile.stages, *w_tile), jnp.bfloat16),
    }
    smem = {
        "lhs": stages["w" if tile.swap else "x"],
        "rhs": stages["x" if tile.swap else "w"],
        "out": core.store_buffer(tile, out_dtype, ragged=True),
        **core.Ring.barriers(tile, copies=1 + products),
    }
    return core.launch(
        body,
        outs,
        smem,
        ctas=ctas,
        warpgroups=tile.warpgroups,
        name="grouped_matmul",
    )(*xs, *ws, table, count, *extras)
