"""Gated delta rule, one token for each of many sequences.

A token's rows stand as columns of narrow products: S^T [V, K] times [q k ...] [K, 8] and so on. A
tensor core sums K in the same order whichever side an operand is on and however wide the other one
is, so each element has the bits that the prefill kernels, with rows of whole chunks, give it.

`normalize` makes unit q and k of many tokens at once; `prepare_row`, over (sequence, key head),
makes row i of k, G, T and the scores; `advance_row`, over (sequence, value head, columns of V),
makes r, d and o from S, and folds the chunk into S when the row completes it.
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
    columns,
    index,
    operand,
    part,
    pick,
    plain,
    product,
    rows,
    solve_row,
    turned,
    unit,
)

# The narrowest right-hand side of a tensor core product.
NARROW = 8


def _joined(i, held: jax.Array, row: jax.Array) -> jax.Array:
    """held [C, N] before row i, row [N] (column layout) at row i, zeros after."""
    at = index(held.shape, 0)
    zero = jnp.zeros(held.shape, held.dtype)
    return jnp.where(at < i, held, jnp.where(at == i, columns(row, held.shape[0]), zero))


def _every_row(x, size: int) -> jax.Array:
    """A scalar as a vector in row layout."""
    return plgpu.layout_cast(jnp.full((size,), x), ROW)


def normalize(q: jax.Array, k: jax.Array, *, epsilon: float) -> jax.Array:
    """q, k [N, K] bfloat16, N a multiple of 64 -> [N, 8, K]: unit q times K^-1/2, unit k, then
    anything."""
    count, width = k.shape

    parts = width // 64

    def body(q_gmem, k_gmem, out, q_smem, k_smem, barrier):
        here = pl.ds(lax.axis_index("tile") * CHUNK, CHUNK)
        for e in range(parts):
            plgpu.copy_gmem_to_smem(q_gmem.at[here, part(e)], q_smem.at[e], barrier)
            plgpu.copy_gmem_to_smem(k_gmem.at[here, part(e)], k_smem.at[e], barrier)
        plgpu.barrier_wait(barrier)
        for x_smem, scale in ((q_smem, width**-0.5), (k_smem, 1.0)):
            tiles = [x_smem[e].astype(jnp.float32) for e in range(parts)]
            for e, x in enumerate(unit(tiles, epsilon, scale)[0]):
                x_smem[e] = x.astype(k.dtype)
        plgpu.commit_smem()
        for e in range(parts):
            plgpu.copy_smem_to_gmem(q_smem.at[e], out.at[here, 0, part(e)])
            plgpu.copy_smem_to_gmem(k_smem.at[e], out.at[here, 1, part(e)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, NARROW, width), k.dtype),
        grid=(count // CHUNK,),
        grid_names=("tile",),
        scratch_types=[
            operand(parts, CHUNK, 64),
            operand(parts, CHUNK, 64),
            plgpu.Barrier(num_arrivals=2 * parts),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_normalize",
    )(q, k)


QUARTER = CHUNK // 4


def _fetch_rows(i, copies: list, barriers) -> None:
    """Copy rows before i, in quarters of the chunk; copies: (source, target) references [C, ..]."""
    for n in range(4):

        @pl.when(i > n * QUARTER)
        def _(here=slice(n * QUARTER, (n + 1) * QUARTER), n=n):
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source.at[here], target.at[here], barriers.at[n])


def _await_rows(i, barriers) -> None:
    for n in range(4):
        pl.when(i > n * QUARTER)(partial(plgpu.barrier_wait, barriers.at[n]))


def prepare_row(
    x: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    token: jax.Array,
    row: jax.Array,
    used: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    keys,
    inverse,
    decay,
) -> jax.Array:
    """x [T * Hk or more, 8, K] of `normalize`, bfloat16; g, beta [T, Hv] float32; by sequence [S]
    int32 the token, its row of the chunk, whether used, the slot; layer [1]. keys, inverse, decay:
    references to the state's leaves; row `row` of (layer, slot) is written.

    Returns [S, Hv, 8, C] bfloat16: the row of T, that of the scores, then anything.
    """
    sequences, value_heads = token.shape[0], g.shape[1]
    key_heads, width = keys.shape[2], x.shape[2]
    group = value_heads // key_heads

    def body(
        x_gmem, g_gmem, beta_gmem, token_gmem, row_gmem, used_gmem, slot_gmem, layer_gmem,
        keys_gmem, inverse_gmem, decay_gmem,
        out,
        k_smem, x_smem, k_row, T_smem, lower_smem, T_row, scores_row, barrier, row_barriers,
    ):  # fmt: skip
        s, h = lax.axis_index("sequence"), lax.axis_index("head")
        t, i = token_gmem[s], row_gmem[s]
        where = (layer_gmem[0], slot_gmem[s])

        def one():
            _fetch_rows(i, [(keys_gmem.at[*where, h], k_smem)], row_barriers)
            plgpu.copy_gmem_to_smem(x_gmem.at[t * key_heads + h], x_smem, barrier)
            plgpu.copy_gmem_to_smem(x_gmem.at[t * key_heads + h, 1], k_row, barrier)
            held_T, held_G, before = [], [], []
            for e in range(group):
                head = (*where, h * group + e)
                held_T.append(plain(inverse_gmem.at[*head]))
                held_G.append(plain(decay_gmem.at[*head], ROW))
                before.append(decay_gmem[*head, jnp.maximum(i - 1, 0)])
            plgpu.barrier_wait(barrier)
            _await_rows(i, row_barriers)
            k_smem[...] = _joined(i, k_smem[...], plgpu.load(k_row, layout=COLUMN))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_row, keys_gmem.at[*where, h, i])
            both = product((k_smem, turned(x_smem)))
            qk, kk = pick(both, 0), pick(both, 1)

            column = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROW)
            known = index((CHUNK, CHUNK), 0) < i
            nothing = jnp.zeros((CHUNK, CHUNK), x.dtype)
            for first in range(0, group, 2):
                heads = min(2, group - first)
                if first:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for e in range(heads):
                    value_head = h * group + first + e
                    G = jnp.where(i > 0, before[first + e], 0.0) + g_gmem[t, value_head]
                    G_row = _every_row(G, CHUNK)
                    gap = G_row - jnp.where(column == i, G_row, held_G[first + e])
                    weight = jnp.exp(jnp.where(column <= i, gap, 0.0))
                    scores = jnp.where(column <= i, qk * weight, 0.0)
                    strength = _every_row(beta_gmem[t, value_head], CHUNK)
                    lower_smem[e] = jnp.where(column < i, -(kk * weight) * strength, 0.0)
                    scores_row[e] = scores.astype(scores_row.dtype)
                    T = jnp.where(known, held_T[first + e], nothing).astype(jnp.float32)
                    T_smem[:, e * CHUNK : (e + 1) * CHUNK] = T
                    decay_gmem[*where, value_head, i] = G
                plgpu.commit_smem()
                T_row[...] = solve_row(i, lower_smem, T_smem, heads).astype(T_row.dtype)
                plgpu.commit_smem()
                for e in range(heads):
                    value_head = h * group + first + e
                    half = T_row.at[e * CHUNK : (e + 1) * CHUNK]
                    plgpu.copy_smem_to_gmem(half, out.at[s, value_head, 0])
                    plgpu.copy_smem_to_gmem(scores_row.at[e], out.at[s, value_head, 1])
                    plgpu.copy_smem_to_gmem(half, inverse_gmem.at[*where, value_head, i])
            plgpu.wait_smem_to_gmem(0)

        pl.when(used_gmem[s] > 0)(one)

    low, smem = x.dtype, plgpu.SMEM
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((sequences, value_heads, NARROW, CHUNK), low),
        grid=(key_heads, sequences),
        grid_names=("head", "sequence"),
        scratch_types=[
            operand(CHUNK, width),
            operand(NARROW, width),
            smem((width,), low),
            smem((CHUNK, 2 * CHUNK), jnp.float32),
            smem((2, CHUNK), jnp.float32),
            smem((2 * CHUNK,), low),
            smem((2, CHUNK), low),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=4),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_prepare_row",
    )(x, g, beta, token, row, used, slot, layer, keys, inverse, decay)


def advance_row(
    x: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    y: jax.Array,
    first_chunk: jax.Array,
    token: jax.Array,
    row: jax.Array,
    used: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    state,
    state_operand,
    keys,
    residual,
    update,
    decay,
    out,
) -> None:
    """x [T * Hk or more, 8, K] of `normalize`, v [T, Hv, V], y [S, Hv, 8, C] of `prepare_row`,
    bfloat16, beta [T, Hv] float32; by sequence [S] int32 whether S is zero (first_chunk), the
    token, its row of the chunk, whether used, the slot; layer [1]. The rest are references: the
    state's leaves, of which keys and decay hold the token's row already, and o [T, Hv, V] bfloat16,
    whose rows of used tokens are written.
    """
    key_heads, width = keys.shape[2], x.shape[2]
    _, value_heads, value_width = v.shape
    group = value_heads // key_heads
    block, parts = 64, width // 64
    low = x.dtype

    def body(
        x_gmem, v_gmem, beta_gmem, y_gmem,
        fresh_gmem, token_gmem, row_gmem, used_gmem, slot_gmem, layer_gmem,
        state_gmem, operand_gmem, keys_gmem, residual_gmem, update_gmem, decay_gmem, o_gmem,
        S_smem, r_smem, d_smem, x_smem, y_smem, v_row, r_row, d_row, o_row,
        barrier, row_barriers, keys_barrier,
    ):  # fmt: skip
        s, h, b = lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("block")
        key_head = lax.div(h, jnp.int32(group))
        t, i, fresh = token_gmem[s], row_gmem[s], fresh_gmem[s]
        where = (layer_gmem[0], slot_gmem[s], h)
        here = pl.ds(b * block, block)

        def one():
            for e in range(parts):
                S = operand_gmem.at[*where, part(e), here]
                plgpu.copy_gmem_to_smem(S, S_smem.at[e], barrier)
                source = x_gmem.at[t * key_heads + key_head, :, part(e)]
                plgpu.copy_gmem_to_smem(source, x_smem.at[e], barrier)
            plgpu.copy_gmem_to_smem(y_gmem.at[s, h], y_smem, barrier)
            plgpu.copy_gmem_to_smem(v_gmem.at[t, h, here], v_row, barrier)
            before = [
                (residual_gmem.at[*where, :, here], r_smem),
                (update_gmem.at[*where, :, here], d_smem),
            ]
            _fetch_rows(i, before, row_barriers)
            G, strength = decay_gmem[*where, i], beta_gmem[t, h]
            plgpu.barrier_wait(barrier)
            both = product(*((turned(S_smem.at[e]), turned(x_smem.at[e])) for e in range(parts)))
            # Not a product with 0: a slot that no sequence filled may hold anything.
            read, seen = (jnp.where(fresh == 0, pick(both, n), 0.0) for n in (0, 1))
            grown = jnp.exp(_every_row(G, block))
            value = plgpu.load(v_row, layout=ROW).astype(jnp.float32)
            r_row[...] = (_every_row(strength, block) * (value - grown * seen)).astype(low)
            _await_rows(i, row_barriers)
            plgpu.commit_smem()
            r_smem[...] = _joined(i, r_smem[...], plgpu.load(r_row, layout=COLUMN))
            plgpu.commit_smem()  # every warp is done with S_smem

            @pl.when(i == CHUNK - 1)
            def _():
                for e in range(parts):
                    source = keys_gmem.at[where[0], where[1], key_head, :, part(e)]
                    plgpu.copy_gmem_to_smem(source, S_smem.at[e], keys_barrier)

            weights = turned(y_smem)
            d_row[...] = pick(product((turned(r_smem), weights)), 0).astype(low)
            plgpu.commit_smem()
            d_smem[...] = _joined(i, d_smem[...], plgpu.load(d_row, layout=COLUMN))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r_row, residual_gmem.at[*where, i, here])
            plgpu.copy_smem_to_gmem(d_row, update_gmem.at[*where, i, here])
            o = grown * read + pick(product((turned(d_smem), weights)), 1)
            o_row[...] = o.astype(low)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_row, o_gmem.at[t, h, here])

            @pl.when(i == CHUNK - 1)
            def _():
                G_end = decay_gmem[*where, CHUNK - 1]
                G_row = plain(decay_gmem.at[*where], ROW)
                fade = rows(jnp.exp(G_end - G_row), block)
                r_smem[...] = (fade * d_smem[...].astype(jnp.float32)).astype(low)
                plgpu.barrier_wait(keys_barrier)
                plgpu.commit_smem()
                decay = jnp.exp(jnp.full((64, block), G_end))
                for e in range(parts):
                    new = product((turned(S_smem.at[e]), r_smem))
                    S = plain(state_gmem.at[*where, part(e), here])
                    S = decay * jnp.where(fresh == 0, S, 0.0) + new
                    state_gmem[*where, part(e), here] = S
                    operand_gmem[*where, part(e), here] = S.astype(low)

            plgpu.wait_smem_to_gmem(0)

        pl.when(used_gmem[s] > 0)(one)

    smem = plgpu.SMEM
    plgpu.kernel(
        body,
        out_type=(),
        grid=(value_width // block, value_heads, token.shape[0]),
        grid_names=("block", "head", "sequence"),
        scratch_types=[
            operand(parts, 64, block),
            operand(CHUNK, block),
            operand(CHUNK, block),
            operand(parts, NARROW, 64),
            operand(NARROW, CHUNK),
            smem((block,), low),
            smem((block,), low),
            smem((block,), low),
            smem((block,), low),
            plgpu.Barrier(num_arrivals=2 + 2 * parts),
            plgpu.Barrier(num_arrivals=2, num_barriers=4),
            plgpu.Barrier(num_arrivals=parts),
        ],
        compiler_params=PARAMS,
        kernel_name="gated_delta_advance_row",
    )(
        x, v, beta, y, first_chunk, token, row, used, slot, layer,
        state, state_operand, keys, residual, update, decay, out,
    )  # fmt: skip
