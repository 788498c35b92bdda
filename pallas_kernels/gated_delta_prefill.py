"""Gated delta rule over whole chunks: what a chunk knows without its state, then the walk over
chunks.

`prepare` runs over (piece, key head) and is parallel: unit keys and queries, G, the scores, T.
`advance` runs over (sequence, value head, columns of V) and is serial over a sequence's chunks: r,
d, o, S. A piece is a run of rows of one chunk; row c of a tile is row c of the chunk. Rows before
the piece's first come from the open chunk that the state holds; rows after its last are zero in
every input.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_tiles import (
    CHUNK,
    COLUMN,
    PARAMS,
    ROW,
    decayed,
    index,
    operand,
    part,
    plain,
    product,
    rows,
    running_sums,
    solve,
    turned,
    two_products,
    unit,
    walk_fetch,
    walk_scratch,
    walk_sizes,
)


def _shape(shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def prepare(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    offset: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    open_keys,
    open_inverse,
    open_decay,
    *,
    epsilon: float,
) -> tuple[jax.Array, ...]:
    """q, k [P, Hk, C, K] bfloat16, g, beta [P, Hv, C] float32, offset, slot [P], layer [1] int32;
    open_* are references to [layers, slots, heads, ...], read at (layer, slot) where offset > 0.

    Returns unit q (times K^-1/2) and k [P, Hk, C, K], the factors that made them unit [P, Hk, 2, C]
    float32, G [P, Hv, C] float32, T and the scores [P, Hv, C, C].
    """
    pieces, key_heads, _, width = k.shape
    value_heads, low = g.shape[1], k.dtype
    group = value_heads // key_heads

    parts = width // 64

    def body(
        q_gmem, k_gmem, g_gmem, beta_gmem, offset_gmem, slot_gmem, layer_gmem,
        keys_gmem, inverse_gmem, decay_gmem,
        q_out, k_out, factor_out, G_out, T_out, scores_out,
        q_smem, k_smem, g_smem, beta_smem, held_smem, G_smem, factor_smem, tile_smem,
        barrier, held_barrier,
    ):  # fmt: skip
        p, h = lax.axis_index("piece"), lax.axis_index("head")
        for e in range(parts):
            plgpu.copy_gmem_to_smem(q_gmem.at[p, h, :, part(e)], q_smem.at[e], barrier)
            plgpu.copy_gmem_to_smem(k_gmem.at[p, h, :, part(e)], k_smem.at[e], barrier)
        for e in range(group):
            plgpu.copy_gmem_to_smem(g_gmem.at[p, h * group + e], g_smem.at[e], barrier)
            plgpu.copy_gmem_to_smem(beta_gmem.at[p, h * group + e], beta_smem.at[e], barrier)
        at = offset_gmem[p]
        where = (layer_gmem[0], slot_gmem[p])

        @pl.when(at > 0)
        def _():
            for e in range(group):
                source = decay_gmem.at[*where, h * group + e]
                plgpu.copy_gmem_to_smem(source, held_smem.at[e], held_barrier)
            plgpu.barrier_wait(held_barrier)

        plgpu.barrier_wait(barrier)
        square = (CHUNK, CHUNK)
        row, column = index(square, 0), index(square, 1)
        for i, (x_smem, scale) in enumerate(((q_smem, width**-0.5), (k_smem, 1.0))):
            tiles = [x_smem[e].astype(jnp.float32) for e in range(parts)]
            tiles, factor = unit(tiles, epsilon, scale)
            for e in range(parts):
                x_smem[e] = tiles[e].astype(low)
            factor_smem[i] = factor

        @pl.when(at > 0)
        def _():
            for e in range(parts):
                source = keys_gmem.at[*where, h, :, part(e)]
                old = plain(source)
                k_smem[e] = jnp.where(row < at, old, k_smem[e])

        plgpu.commit_smem()
        for e in range(parts):
            plgpu.copy_smem_to_gmem(q_smem.at[e], q_out.at[p, h, :, part(e)])
            plgpu.copy_smem_to_gmem(k_smem.at[e], k_out.at[p, h, :, part(e)])
        plgpu.copy_smem_to_gmem(factor_smem, factor_out.at[p, h])
        keys = [turned(k_smem.at[e]) for e in range(parts)]
        qk = product(*((q_smem.at[e], keys[e]) for e in range(parts)))
        each = lambda ref: [ref.at[e] for e in range(group)]  # noqa: E731
        for e, G in enumerate(running_sums(each(g_smem), at, each(held_smem))):
            G_smem[e] = G
        plgpu.commit_smem()

        def decay(e):
            G_row, G_column = (plgpu.load(G_smem.at[e], layout=x) for x in (ROW, COLUMN))
            return decayed(G_row, G_column, row, column)

        # The scores first, then L: qk and kk are not held at once, so that three programs share
        # the registers of a multiprocessor.
        low_smem = q_smem
        for start in range(0, group, 2):
            heads = min(2, group - start)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for e in range(heads):
                scores = jnp.where(row >= column, qk * decay(start + e), 0.0)
                low_smem[e] = scores.astype(low)
            kk = product(*((k_smem.at[e], keys[e]) for e in range(parts)))
            for e in range(heads):
                strength = rows(plgpu.load(beta_smem.at[start + e], layout=ROW), CHUNK)
                lower = jnp.where(row > column, -(kk * decay(start + e)) * strength, 0.0)
                tile_smem[:, part(e)] = lower

                @pl.when(at > 0)
                def _(e=e, head=h * group + start + e, lower=lower):
                    source = inverse_gmem.at[*where, head]
                    T = plain(source).astype(jnp.float32)
                    tile_smem[:, part(e)] = jnp.where(row < at, T, lower)

            plgpu.commit_smem()
            for e in range(heads):
                head = h * group + start + e
                plgpu.copy_smem_to_gmem(low_smem.at[e], scores_out.at[p, head])
                plgpu.copy_smem_to_gmem(G_smem.at[start + e], G_out.at[p, head])
            solve(tile_smem, at, heads)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for e in range(heads):
                T = plain(tile_smem.at[:, part(e)])
                low_smem[e] = T.astype(low)
            plgpu.commit_smem()
            for e in range(heads):
                plgpu.copy_smem_to_gmem(low_smem.at[e], T_out.at[p, h * group + start + e])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    smem = plgpu.SMEM
    return plgpu.kernel(
        body,
        out_type=[
            _shape(q.shape),
            _shape(k.shape),
            _shape((pieces, key_heads, 2, CHUNK), jnp.float32),
            _shape(g.shape, jnp.float32),
            _shape((pieces, value_heads, CHUNK, CHUNK)),
            _shape((pieces, value_heads, CHUNK, CHUNK)),
        ],
        grid=(key_heads, pieces),
        grid_names=("head", "piece"),
        scratch_types=[
            operand(max(2, parts), CHUNK, 64),
            operand(max(2, parts), CHUNK, 64),
            smem((group, CHUNK), jnp.float32),
            smem((group, CHUNK), jnp.float32),
            smem((group, CHUNK), jnp.float32),
            smem((group, CHUNK), jnp.float32),
            smem((2, CHUNK), jnp.float32),
            smem((CHUNK, 2 * CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * parts + 2 * group),
            plgpu.Barrier(num_arrivals=group),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_prepare",
    )(q, k, g, beta, offset, slot, layer, open_keys, open_inverse, open_decay)


def advance(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    G: jax.Array,
    beta: jax.Array,
    T: jax.Array,
    scores: jax.Array,
    offset: jax.Array,
    length: jax.Array,
    first: jax.Array,
    count: jax.Array,
    fresh: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    held: tuple,
    *,
    save: bool,
) -> tuple[jax.Array, ...]:
    """q, k [P, Hk, C, K], v [P, Hv, C, V], T, scores [P, Hv, C, C] bfloat16, G, beta [P, Hv, C]
    float32; offset, length [P]; first piece, count of pieces, fresh (starts from zero) and slot
    [S]; layer [1] int32. held: references to the state's leaves (state, operand, keys, inverse,
    residual, update, decay), updated at (layer, slot) for every sequence with a piece.

    Returns o [P, Hv, C, V] bfloat16; with `save` also each chunk's entry state, bfloat16 [P, Hv, K,
    V], and d [P, Hv, C, V].
    """
    pieces, key_heads, _, width = k.shape
    value_heads, value_width = v.shape[1], v.shape[3]
    group = value_heads // key_heads
    block, stages = walk_sizes(first.shape[0] * value_heads * value_width)
    low = k.dtype

    def body(
        q_gmem, k_gmem, v_gmem, G_gmem, beta_gmem, T_gmem, scores_gmem,
        offset_gmem, length_gmem, first_gmem, count_gmem, fresh_gmem, slot_gmem, layer_gmem,
        state_gmem, operand_gmem, keys_gmem, inverse_gmem, residual_gmem, update_gmem, decay_gmem,
        *rest,
    ):  # fmt: skip
        outputs, scratch = (rest[:3], rest[3:]) if save else (rest[:1], rest[1:])
        (
            q_smem, k_smem, v_smem, G_smem, beta_smem, T_smem, scores_smem, barriers,
            S_smem, r_smem, d_smem, faded_smem, o_smem, full_smem, held_barrier,
        ) = scratch  # fmt: skip
        sources = q_gmem, k_gmem, v_gmem, G_gmem, beta_gmem, T_gmem, scores_gmem
        targets = q_smem, k_smem, v_smem, G_smem, beta_smem, T_smem, scores_smem
        s, h, b = lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("block")
        key_head = lax.div(h, jnp.int32(group))
        here = pl.ds(b * block, block)
        start, steps = first_gmem[s], count_gmem[s]
        where = (layer_gmem[0], slot_gmem[s])

        def fetch(i):
            stage = lax.rem(i, jnp.int32(stages))
            walk_fetch(sources, targets, barriers, start + i, key_head, h, here, stage)

        @pl.when(steps > 0)
        def _():
            for i in range(stages - 1):
                pl.when(i < steps)(partial(fetch, jnp.int32(i)))

            @pl.when(fresh_gmem[s] == 0)
            def _():
                plgpu.copy_gmem_to_smem(state_gmem.at[*where, h, :, here], full_smem, held_barrier)
                plgpu.barrier_wait(held_barrier)

            entry = plain(full_smem)
            entry = jnp.where(fresh_gmem[s] == 0, entry, 0.0)

            def chunk(i, S):
                p, stage = start + i, lax.rem(i, jnp.int32(stages))
                at, rows_end = offset_gmem[p], offset_gmem[p] + length_gmem[p]
                plgpu.barrier_wait(barriers.at[stage])
                keys, queries = k_smem.at[stage], q_smem.at[stage]
                if save:  # the copies of S and d may still run, that of o need not be over
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                S_smem[...] = S.astype(low)
                plgpu.commit_smem()
                if save:
                    plgpu.copy_smem_to_gmem(S_smem, outputs[1].at[p, h, :, here])
                pl.when(i + stages - 1 < steps)(partial(fetch, i + stages - 1))
                G_row = plgpu.load(G_smem.at[stage], layout=ROW)
                grown = rows(jnp.exp(G_row), block)
                strength = rows(plgpu.load(beta_smem.at[stage], layout=ROW), block)
                value = v_smem[stage].astype(jnp.float32)

                def write_residual(seen):
                    r_smem[...] = (strength * (value - grown * seen)).astype(low)

                    @pl.when((i == 0) & (at > 0))
                    def _():
                        source = residual_gmem.at[*where, h, :, here]
                        old = plain(source)
                        before = index((CHUNK, block), 0) < at
                        r_smem[...] = jnp.where(before, old, r_smem[...])

                    return ()

                _, read = two_products((keys, S_smem), (queries, S_smem), write_residual)
                plgpu.commit_smem()
                d = product((T_smem.at[stage], r_smem)).astype(low)
                d_smem[...] = d
                G_end = G_smem[stage, CHUNK - 1]
                fade = rows(jnp.exp(G_end - G_row), block)
                faded_smem[...] = (fade * d.astype(jnp.float32)).astype(low)
                plgpu.commit_smem()
                if save:
                    plgpu.copy_smem_to_gmem(d_smem, outputs[2].at[p, h, :, here])
                plgpu.wait_smem_to_gmem(2 if save else 0, wait_read_only=True)

                def write_output(within):
                    o_smem[...] = (grown * read + within).astype(low)
                    return ()

                _, new = two_products(
                    (scores_smem.at[stage], d_smem),
                    (turned(keys), faded_smem),
                    write_output,
                )
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, outputs[0].at[p, h, :, here])
                decay = jnp.exp(jnp.full((width, block), G_end))
                return jnp.where(rows_end == CHUNK, decay * S + new, S)

            S = lax.fori_loop(0, steps, chunk, entry)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            full_smem[...] = S
            S_smem[...] = S.astype(low)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(S_smem, operand_gmem.at[*where, h, :, here])
            plgpu.copy_smem_to_gmem(full_smem, state_gmem.at[*where, h, :, here])
            last = start + steps - 1

            @pl.when(offset_gmem[last] + length_gmem[last] < CHUNK)
            def _():
                stage = lax.rem(steps - 1, jnp.int32(stages))
                plgpu.copy_smem_to_gmem(r_smem, residual_gmem.at[*where, h, :, here])
                plgpu.copy_smem_to_gmem(d_smem, update_gmem.at[*where, h, :, here])

                @pl.when(b == 0)
                def _():
                    plgpu.copy_smem_to_gmem(T_smem.at[stage], inverse_gmem.at[*where, h])
                    plgpu.copy_smem_to_gmem(G_smem.at[stage], decay_gmem.at[*where, h])

                    @pl.when(lax.rem(h, jnp.int32(group)) == 0)
                    def _():
                        plgpu.copy_smem_to_gmem(k_smem.at[stage], keys_gmem.at[*where, key_head])

            plgpu.wait_smem_to_gmem(0)

    out = [_shape(v.shape)]
    if save:
        out += [_shape((pieces, value_heads, width, value_width)), _shape(v.shape)]
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(first.shape[0], value_heads, value_width // block),
        grid_names=("sequence", "head", "block"),
        scratch_types=[
            *walk_scratch(block, stages, width),
            operand(width, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
            plgpu.SMEM((width, block), jnp.float32),
            plgpu.Barrier(),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_advance",
    )(
        q, k, v, G, beta, T, scores, offset, length, first, count, fresh, slot, layer, *held
    )  # fmt: skip
