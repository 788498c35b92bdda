"""Gradient of the gated delta rule over whole sequences.

`retreat` walks a sequence's chunks from the last to the first: the gradients of r and of each
chunk's exit state. `gradients` runs over (piece, key head), parallel: the gradients of q, k, v, G
and beta, through the normalisation. With E_ij = exp(G_i - G_j) for j <= i, dots the transposed
quantities and dX the gradient of X:

    dd = A^T do + exp(G_C - G) (k dS'),     dr = T^T dd
    dS = exp(G_C) dS' + q^T (exp(G) do) - k^T (beta exp(G) dr)
    dA = do d^T E,  dL = -dr d^T  (since T = (I + L)^-1),  M = dL beta E
    dq = exp(G) (do S^T) + dA k
    dk = M k - beta exp(G) (dr S^T) + dA^T q + M^T k + exp(G_C - G) (d dS'^T)

G enters as exp(G_i) wherever q_i or (as a row) k_i does and as exp(-G_j) wherever k_j does as a
column, so dG is q.dq + k.dk(row) - k.dk(column). Operands of products are bfloat16, sums float32;
nothing is summed by atomics.
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
    TILE,
    decayed,
    index,
    operand,
    part,
    plain,
    product,
    rows,
    turned,
    two_products,
    walk_fetch,
    walk_scratch,
    walk_sizes,
)


def retreat(
    q: jax.Array,
    k: jax.Array,
    d_o: jax.Array,
    G: jax.Array,
    beta: jax.Array,
    T: jax.Array,
    scores: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """q, k [P, Hk, C, K], d_o [P, Hv, C, V], T, scores [P, Hv, C, C] bfloat16, G, beta [P, Hv, C]
    float32; first piece and count of pieces [S] int32.

    Returns the gradients of r [P, Hv, C, V] and of each chunk's exit state [P, Hv, K, V], bfloat16.
    """
    pieces, key_heads, _, width = k.shape
    value_heads, value_width = d_o.shape[1], d_o.shape[3]
    group = value_heads // key_heads
    block, stages = walk_sizes(first.shape[0] * value_heads * value_width)
    low = k.dtype

    def body(
        q_gmem, k_gmem, d_o_gmem, G_gmem, beta_gmem, T_gmem, scores_gmem, first_gmem, count_gmem,
        d_r_out, d_S_out,
        q_smem, k_smem, d_o_smem, G_smem, beta_smem, T_smem, scores_smem, barriers,
        d_S_smem, d_d_smem, d_r_smem, grown_smem, strong_smem,
    ):  # fmt: skip
        sources = q_gmem, k_gmem, d_o_gmem, G_gmem, beta_gmem, T_gmem, scores_gmem
        targets = q_smem, k_smem, d_o_smem, G_smem, beta_smem, T_smem, scores_smem
        s, h, b = lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("block")
        key_head = lax.div(h, jnp.int32(group))
        here = pl.ds(b * block, block)
        steps = count_gmem[s]
        end = first_gmem[s] + steps - 1

        def fetch(i):
            stage = lax.rem(i, jnp.int32(stages))
            walk_fetch(sources, targets, barriers, end - i, key_head, h, here, stage)

        @pl.when(steps > 0)
        def _():
            for i in range(stages - 1):
                pl.when(i < steps)(partial(fetch, jnp.int32(i)))

            def chunk(i, d_after):
                p, stage = end - i, lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(barriers.at[stage])
                keys, queries = k_smem.at[stage], q_smem.at[stage]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # that of dS is over
                d_S_smem[...] = d_after.astype(low)
                G_row = plgpu.load(G_smem.at[stage], layout=ROW)
                grown = rows(jnp.exp(G_row), block)
                d_o = d_o_smem[stage].astype(jnp.float32)
                grown_smem[...] = (grown * d_o).astype(low)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(d_S_smem, d_S_out.at[p, h, :, here])
                pl.when(i + stages - 1 < steps)(partial(fetch, i + stages - 1))
                G_end = G_smem[stage, CHUNK - 1]
                fade = rows(jnp.exp(G_end - G_row), block)
                d_read, d_kept = two_products(
                    (turned(scores_smem.at[stage]), d_o_smem.at[stage]),
                    (keys, d_S_smem),
                    lambda x: x,
                )
                d_d_smem[...] = (d_read + fade * d_kept).astype(low)
                plgpu.commit_smem()
                d_r = product((turned(T_smem.at[stage]), d_d_smem)).astype(low)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # that of the last dr is over
                d_r_smem[...] = d_r
                strength = rows(plgpu.load(beta_smem.at[stage], layout=ROW), block)
                strong = strength * grown * d_r.astype(jnp.float32)
                strong_smem[...] = strong.astype(low)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(d_r_smem, d_r_out.at[p, h, :, here])
                read, removed = two_products(
                    (turned(queries), grown_smem),
                    (turned(keys), strong_smem),
                    lambda x: x,
                )
                decay = jnp.exp(jnp.full((width, block), G_end))
                return decay * d_after + (read - removed)

            zero = plgpu.layout_cast(jnp.zeros((width, block), jnp.float32), TILE)
            lax.fori_loop(0, steps, chunk, zero)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(d_o.shape, low),
            jax.ShapeDtypeStruct((pieces, value_heads, width, value_width), low),
        ],
        grid=(first.shape[0], value_heads, value_width // block),
        grid_names=("sequence", "head", "block"),
        scratch_types=[
            *walk_scratch(block, stages, width),
            operand(width, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
            operand(CHUNK, block, tile=block),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_retreat",
    )(q, k, d_o, G, beta, T, scores, first, count)


def gradients(
    q: jax.Array,
    k: jax.Array,
    factors: jax.Array,
    v: jax.Array,
    G: jax.Array,
    beta: jax.Array,
    d_o: jax.Array,
    d: jax.Array,
    d_r: jax.Array,
    entry: jax.Array,
    d_after: jax.Array,
) -> tuple[jax.Array, ...]:
    """q, k [P, Hk, C, K], v, d_o, d, d_r [P, Hv, C, V], entry, d_after [P, Hv, K, V] bfloat16;
    factors [P, Hk, 2, C], G, beta [P, Hv, C] float32.

    Returns d_q, d_k [P, Hk, C, K] with respect to what was normalised, d_v [P, Hv, C, V], bfloat16;
    dG but for the last row's share in S' and d_beta [P, Hv, C]; that share by rows: sum_j k_j.dk_j
    of the fold's keys [P, Hv, C] and S.dS' by row of K [P, Hv, K], float32.
    """
    pieces, key_heads, _, width = k.shape
    value_heads, value_width = d_o.shape[1], d_o.shape[3]
    group = value_heads // key_heads
    low = k.dtype
    key_parts, value_parts = range(width // 64), range(value_width // 64)

    # One warpgroup for each 64 columns of K: the sums over value heads stay in its registers. What
    # all of them read (dA, M) is made by the first and by the last.
    def body(
        q_gmem, k_gmem, factors_gmem, v_gmem, G_gmem, beta_gmem,
        d_o_gmem, d_gmem, d_r_gmem, entry_gmem, d_after_gmem,
        d_q_out, d_k_out, d_v_out, d_G_out, d_beta_out, faded_out, stated_out,
        q_smem, k_smem, v_smem, d_o_smem, d_smem, d_r_smem, S_smem, d_S_smem, d_qk_smem, d_kk_smem,
        beta_smem, shares_smem, inside_smem, key_barrier, barrier, S_barriers, d_S_barriers, meet,
    ):  # fmt: skip
        p, h, e = lax.axis_index("piece"), lax.axis_index("head"), lax.axis_index("part")
        own = pl.ds(64 * e, 64)
        total = lambda terms: sum(terms[1:], terms[0])  # noqa: E731

        def along(x, y):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            return jnp.sum(lax.optimization_barrier(x * y), axis=1)

        def together():
            """Until every warpgroup is here, and sees what the others wrote."""
            plgpu.commit_smem()
            plgpu.barrier_arrive(meet)
            plgpu.barrier_wait(meet)

        def fetch_rows(head, *pairs):
            @pl.when(e == 0)
            def _():
                for source, target in pairs:
                    for i in value_parts:
                        block = source.at[p, head, :, part(i)]
                        plgpu.copy_gmem_to_smem(block, target.at[i], barrier)

        def fetch_state(source, head, target, barriers):
            for i in value_parts:
                block = source.at[p, head, own, part(i)]
                plgpu.copy_gmem_to_smem(block, target.at[e, i], barriers.at[e])

        early = ((v_gmem, v_smem), (d_r_gmem, d_r_smem), (d_o_gmem, d_o_smem))
        plgpu.copy_gmem_to_smem(q_gmem.at[p, h, :, own], q_smem.at[e], key_barrier)
        plgpu.copy_gmem_to_smem(k_gmem.at[p, h, :, own], k_smem.at[e], key_barrier)
        fetch_rows(h * group, *early, (d_gmem, d_smem))
        fetch_state(entry_gmem, h * group, S_smem, S_barriers)
        fetch_state(d_after_gmem, h * group, d_S_smem, d_S_barriers)
        plgpu.barrier_wait(key_barrier)
        square = (CHUNK, CHUNK)
        row, column = index(square, 0), index(square, 1)

        def value_head(member, sums):
            head, turn = h * group + member, lax.rem(member, 2)
            more = member + 1 < group
            G_row, G_column = (plain(G_gmem.at[p, head], x) for x in (ROW, COLUMN))
            G_end = G_gmem[p, head, CHUNK - 1]
            strength = rows(plain(beta_gmem.at[p, head], ROW), 64)
            grown = rows(jnp.exp(G_row), 64)
            plgpu.barrier_wait(barrier)

            @pl.when(e == 0)
            def _():
                beta_smem[turn, 0] = total([along(v_smem[i], d_r_smem[i]) for i in value_parts])
                for i in value_parts:
                    v_smem[i] = (strength * d_r_smem[i].astype(jnp.float32)).astype(low)
                d_qk = product(*((d_o_smem.at[i], turned(d_smem.at[i])) for i in value_parts))
                decay = decayed(G_row, G_column, row, column)
                d_qk_smem[...] = jnp.where(row >= column, d_qk * decay, 0.0).astype(low)

            @pl.when(e == len(key_parts) - 1)
            def _():
                d_lower = product(*((d_r_smem.at[i], turned(d_smem.at[i])) for i in value_parts))
                decay = decayed(G_row, G_column, row, column)
                d_lower = jnp.where(row > column, -d_lower * decay, 0.0)
                d_kk_smem[...] = (d_lower * strength).astype(low)
                kk = product(*((k_smem.at[j], turned(k_smem.at[j])) for j in key_parts))
                beta_smem[turn, 1] = along(kk, d_lower)

            together()

            @pl.when(e == 0)
            def _():
                for i in value_parts:
                    plgpu.copy_smem_to_gmem(v_smem.at[i], d_v_out.at[p, head, :, part(i)])

            # What rows read from the entry state.
            plgpu.barrier_wait(S_barriers.at[e])
            from_state = [turned(S_smem.at[e, i]) for i in value_parts]
            d_q = grown * product(*((d_o_smem.at[i], from_state[i]) for i in value_parts))
            d_q = d_q + product((d_qk_smem, k_smem.at[e]))
            d_G = along(q_smem[e], d_q)
            d_q_sum = sums[0] + d_q
            removed = grown * product(*((d_r_smem.at[i], from_state[i]) for i in value_parts))
            shares_smem[2, e] = along(k_smem[e], removed)
            d_k = product((d_kk_smem, k_smem.at[e])) - strength * removed
            d_G = d_G + along(k_smem[e], d_k)
            d_k_sum = sums[1] + d_k
            plgpu.barrier_wait(d_S_barriers.at[e])
            stated = [along(S_smem[e, i], d_S_smem[e, i]) for i in value_parts]
            stated_out[p, head, own] = total(stated)
            together()

            @pl.when(more)
            def _():
                fetch_state(entry_gmem, head + 1, S_smem, S_barriers)
                pl.when(e == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                fetch_rows(head + 1, *early)

            # What they left for the exit state, and for later rows.
            fade = rows(jnp.exp(G_end - G_row), 64)
            d_S = [turned(d_S_smem.at[e, i]) for i in value_parts]
            fold = fade * product(*((d_smem.at[i], d_S[i]) for i in value_parts))
            shares_smem[1, e] = along(k_smem[e], fold)
            d_k = fold + product(
                (turned(d_qk_smem), q_smem.at[e]), (turned(d_kk_smem), k_smem.at[e])
            )
            shares_smem[0, e] = d_G - along(k_smem[e], d_k)
            together()

            @pl.when(more)
            def _():
                fetch_state(d_after_gmem, head + 1, d_S_smem, d_S_barriers)
                fetch_rows(head + 1, (d_gmem, d_smem))

            @pl.when(e == 0)
            def _():
                d_G, faded, removed = (
                    total([plgpu.load(shares_smem.at[n, j], layout=ROW) for j in key_parts])
                    for n in range(3)
                )
                d_G_out[p, head] = d_G
                faded_out[p, head] = faded
                mine, others = (plgpu.load(beta_smem.at[turn, n], layout=ROW) for n in (0, 1))
                d_beta_out[p, head] = mine + others - removed

            return d_q_sum, d_k_sum + d_k

        zero = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.float32), TILE)
        sums = lax.fori_loop(0, group, value_head, (zero, zero))

        # Through x / |x|: the part along x falls away.
        for n, (unit_smem, out, scale) in enumerate(
            ((q_smem, d_q_out, width**-0.5), (k_smem, d_k_out, 1.0))
        ):
            unit, d_unit = unit_smem[e].astype(jnp.float32) * (1 / scale), sums[n] * scale
            inside_smem[n, e] = along(unit, d_unit)
            together()
            inside = total([plgpu.load(inside_smem.at[n, j], layout=ROW) for j in key_parts])
            factor = plain(factors_gmem.at[p, h, n], ROW)
            d_x = rows(factor, 64) * (d_unit - unit * rows(inside, 64))
            unit_smem[e] = d_x.astype(low)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(unit_smem.at[e], out.at[p, h, :, own])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    smem = plgpu.SMEM
    shape = jax.ShapeDtypeStruct
    by_row = shape((pieces, value_heads, CHUNK), jnp.float32)
    keys, values = len(key_parts), len(value_parts)
    return plgpu.kernel(
        body,
        out_type=[
            shape(q.shape, low),
            shape(k.shape, low),
            shape(d_o.shape, low),
            by_row,
            by_row,
            by_row,
            shape((pieces, value_heads, width), jnp.float32),
        ],
        grid=(key_heads, pieces),
        grid_names=("head", "piece"),
        num_threads=keys,
        thread_name="part",
        scratch_types=[
            operand(keys, CHUNK, 64),
            operand(keys, CHUNK, 64),
            operand(values, CHUNK, 64),
            operand(values, CHUNK, 64),
            operand(values, CHUNK, 64),
            operand(values, CHUNK, 64),
            operand(keys, values, 64, 64),
            operand(keys, values, 64, 64),
            operand(CHUNK, CHUNK),
            operand(CHUNK, CHUNK),
            smem((2, 2, CHUNK), jnp.float32),
            smem((3, keys, CHUNK), jnp.float32),
            smem((2, keys, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * keys),
            plgpu.Barrier(num_arrivals=4 * values),
            plgpu.Barrier(num_arrivals=values, num_barriers=keys),
            plgpu.Barrier(num_arrivals=values, num_barriers=keys),
            plgpu.Barrier(num_arrivals=keys),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_gradients",
    )(q, k, factors, v, G, beta, d_o, d, d_r, entry, d_after)
