"""Gated delta rule, one token for each of many sequences.

The same tiles as the prefill kernels, every row of which holds the one token: row i of a tile is then at hand
wherever row i of the chunk is wanted. `prepare_row` makes row i of k, T, the scores and G and keeps them;
`advance_row` makes r, d and o from S, and folds the chunk into S when the row completes it.
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
    any_row,
    columns,
    index,
    inverse_row,
    operand,
    product,
    replicated_product,
    rows,
    unit,
)

TILE = plgpu.Layout.WGMMA


def _vector(source) -> jax.Array:
    return plgpu.load(source, layout=COLUMN, optimized=False)


def _joined(i, held: jax.Array, row: jax.Array) -> jax.Array:
    """held [C, N] before row i, `row` (repeated) at row i, zeros after."""
    at = index(held.shape, 0)
    zero = jnp.zeros(held.shape, held.dtype)
    return jnp.where(at < i, held, jnp.where(at == i, row, zero))


def prepare_row(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    row: jax.Array,
    used: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    keys,
    inverse,
    decay,
    *,
    epsilon: float,
) -> tuple[jax.Array, ...]:
    """q, k [S, Hk, K] bfloat16, g, beta [S, Hv] float32; row (of the chunk), used, slot [S], layer [1] int32.
    keys, inverse, decay: references to the state's leaves; row `row` of (layer, slot) is written.

    Returns unit q (times K^-1/2), k [S, Hk, K], row of T and of the scores [S, Hv, C], bfloat16.
    """
    sequences, key_heads, width = k.shape
    value_heads = g.shape[1]
    group = value_heads // key_heads

    def body(
        q_gmem, k_gmem, g_gmem, beta_gmem, row_gmem, used_gmem, slot_gmem, layer_gmem,
        keys_gmem, inverse_gmem, decay_gmem,
        q_out, k_out, T_out, scores_out,
        k_smem, x_smem, T_smem, lower_smem, q_row, k_row, T_row, scores_row, barrier,
    ):  # fmt: skip
        s, h = lax.axis_index("sequence"), lax.axis_index("head")
        i = row_gmem[s]
        where = (layer_gmem[0], slot_gmem[s])

        def one():
            plgpu.copy_gmem_to_smem(keys_gmem.at[*where, h], k_smem, barrier)
            tile = lambda x: columns(_vector(x.at[s, h]), CHUNK).astype(jnp.float32)  # noqa: E731
            query = unit(tile(q_gmem), epsilon, width**-0.5)[0].astype(q.dtype)
            key = unit(tile(k_gmem), epsilon, 1.0)[0].astype(k.dtype)
            q_row[...] = any_row(query)
            k_row[...] = any_row(key)
            plgpu.barrier_wait(barrier)
            k_smem[...] = _joined(i, k_smem[...], key)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_row, q_out.at[s, h])
            plgpu.copy_smem_to_gmem(k_row, k_out.at[s, h])
            plgpu.copy_smem_to_gmem(k_row, keys_gmem.at[*where, h, i])
            kk = replicated_product(key, x_smem, k_smem.transpose((1, 0)))
            qk = replicated_product(query, x_smem, k_smem.transpose((1, 0)))

            square = (CHUNK, CHUNK)
            tile_row, column = index(square, 0), index(square, 1)
            for first in range(0, group, 2):
                heads = min(2, group - first)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for e in range(heads):
                    value_head = h * group + first + e
                    before = decay_gmem[*where, value_head, jnp.maximum(i - 1, 0)]
                    G = jnp.where(i > 0, before, 0.0) + g_gmem[s, value_head]
                    G_held = columns(_vector(decay_gmem.at[*where, value_head]), CHUNK)
                    G_column = jnp.where(column == i, jnp.full(square, G), G_held)
                    gap = jnp.full(square, G) - G_column
                    weight = jnp.exp(jnp.where(column <= i, gap, 0.0))
                    scores = jnp.where(column <= i, qk * weight, 0.0)
                    strength = jnp.full(square, beta_gmem[s, value_head])
                    lower = jnp.where(column < i, -(kk * weight) * strength, 0.0)
                    scores_row[e] = any_row(scores).astype(scores_row.dtype)
                    lower_smem[e] = any_row(lower)
                    held = plgpu.load(
                        inverse_gmem.at[*where, value_head], layout=TILE, optimized=False
                    )
                    T_smem[:, e * CHUNK : (e + 1) * CHUNK] = jnp.where(
                        tile_row < i, held, jnp.zeros(square, held.dtype)
                    )
                    decay_gmem[*where, value_head, i] = G
                lower = tuple(partial(lambda e, j: lower_smem[e, j], e) for e in (0, 1))
                T_row[...] = inverse_row(i, lower, T_smem, heads).astype(T_row.dtype)
                plgpu.commit_smem()
                for e in range(heads):
                    value_head = h * group + first + e
                    half = T_row.at[e * CHUNK : (e + 1) * CHUNK]
                    plgpu.copy_smem_to_gmem(half, T_out.at[s, value_head])
                    plgpu.copy_smem_to_gmem(half, inverse_gmem.at[*where, value_head, i])
                    plgpu.copy_smem_to_gmem(scores_row.at[e], scores_out.at[s, value_head])
            plgpu.wait_smem_to_gmem(0)

        pl.when(used_gmem[s] > 0)(one)

    low, smem = k.dtype, plgpu.SMEM
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(q.shape, low),
            jax.ShapeDtypeStruct(k.shape, low),
            jax.ShapeDtypeStruct((sequences, value_heads, CHUNK), low),
            jax.ShapeDtypeStruct((sequences, value_heads, CHUNK), low),
        ],
        grid=(key_heads, sequences),
        grid_names=("head", "sequence"),
        scratch_types=[
            operand(CHUNK, width),
            operand(CHUNK, width),
            smem((CHUNK, 2 * CHUNK), low),
            smem((2, CHUNK), jnp.float32),
            smem((width,), low),
            smem((width,), low),
            smem((2 * CHUNK,), low),
            smem((2, CHUNK), low),
            plgpu.Barrier(),
        ],
        compiler_params=PARAMS,
    )(q, k, g, beta, row, used, slot, layer, keys, inverse, decay)


def advance_row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    T: jax.Array,
    scores: jax.Array,
    row: jax.Array,
    used: jax.Array,
    first_chunk: jax.Array,
    slot: jax.Array,
    layer: jax.Array,
    held: tuple,
    *,
    block: int = 64,
) -> jax.Array:
    """q, k [S, Hk, K], v [S, Hv, V], T, scores [S, Hv, C] bfloat16, beta [S, Hv] float32; row, used,
    first_chunk (the state before the chunk is zero), slot [S], layer [1] int32. held: references to state,
    keys, residual, update and decay; the last must hold the token's row of keys and decay already.

    Returns o [S, Hv, V] bfloat16.
    """
    sequences, key_heads, width = k.shape
    value_heads, value_width = v.shape[1:]
    group = value_heads // key_heads
    block = min(block, value_width)
    low = k.dtype

    def body(
        q_gmem, k_gmem, v_gmem, beta_gmem, T_gmem, scores_gmem,
        row_gmem, used_gmem, fresh_gmem, slot_gmem, layer_gmem,
        state_gmem, keys_gmem, residual_gmem, update_gmem, decay_gmem,
        out,
        S_smem, r_smem, d_smem, k_smem, x_smem, r_row, d_row, o_row, barrier, keys_barrier,
    ):  # fmt: skip
        s, h, b = lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("block")
        key_head = lax.div(h, jnp.int32(group))
        i = row_gmem[s]
        where = (layer_gmem[0], slot_gmem[s], h)
        here = pl.ds(b * block, block)

        def one():
            plgpu.copy_gmem_to_smem(residual_gmem.at[*where, :, here], r_smem, barrier)
            plgpu.copy_gmem_to_smem(update_gmem.at[*where, :, here], d_smem, barrier)

            def entry():
                S = plgpu.load(state_gmem.at[*where, :, here], layout=TILE, optimized=False)
                return jnp.where(fresh_gmem[s] == 0, S, 0.0)

            S_smem[...] = entry().astype(low)
            plgpu.commit_smem()
            tile = lambda x: columns(_vector(x), CHUNK)  # noqa: E731
            seen = replicated_product(tile(k_gmem.at[s, key_head]), k_smem, S_smem)
            read = replicated_product(tile(q_gmem.at[s, key_head]), k_smem, S_smem)
            shape = (CHUNK, block)
            grown = jnp.exp(jnp.full(shape, decay_gmem[*where, i]))
            strength = jnp.full(shape, beta_gmem[s, h])
            value = columns(_vector(v_gmem.at[s, h, here]), CHUNK).astype(jnp.float32)
            r = (strength * (value - grown * seen)).astype(low)
            r_row[...] = any_row(r)
            plgpu.barrier_wait(barrier)
            r_smem[...] = _joined(i, r_smem[...], r)
            plgpu.commit_smem()  # every warp is done with k_smem

            @pl.when(i == CHUNK - 1)
            def _():
                source = keys_gmem.at[where[0], where[1], key_head]
                plgpu.copy_gmem_to_smem(source, k_smem, keys_barrier)

            d = replicated_product(tile(T_gmem.at[s, h]), x_smem, r_smem).astype(low)
            d_row[...] = any_row(d)
            d_smem[...] = _joined(i, d_smem[...], d)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r_row, residual_gmem.at[*where, i, here])
            plgpu.copy_smem_to_gmem(d_row, update_gmem.at[*where, i, here])
            o = grown * read + replicated_product(tile(scores_gmem.at[s, h]), x_smem, d_smem)
            o_row[...] = any_row(o.astype(low))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_row, out.at[s, h, here])

            @pl.when(i == CHUNK - 1)
            def _():
                G_end = decay_gmem[*where, CHUNK - 1]
                G_row = plgpu.load(decay_gmem.at[*where], layout=ROW, optimized=False)
                fade = rows(jnp.exp(G_end - G_row), block)
                r_smem[...] = (fade * d_smem[...].astype(jnp.float32)).astype(low)
                plgpu.barrier_wait(keys_barrier)
                plgpu.commit_smem()
                new = product(k_smem.transpose((1, 0)), r_smem)
                decay = jnp.exp(jnp.full((width, block), G_end))
                state_gmem[*where, :, here] = decay * entry() + new

            plgpu.wait_smem_to_gmem(0)

        pl.when(used_gmem[s] > 0)(one)

    smem = plgpu.SMEM
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, low),
        grid=(value_width // block, value_heads, sequences),
        grid_names=("block", "head", "sequence"),
        scratch_types=[
            operand(width, block),
            operand(CHUNK, block),
            operand(CHUNK, block),
            operand(CHUNK, width),
            operand(CHUNK, CHUNK),
            smem((block,), low),
            smem((block,), low),
            smem((block,), low),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
        ],
        compiler_params=PARAMS,
    )(q, k, v, beta, T, scores, row, used, first_chunk, slot, layer, *held)
