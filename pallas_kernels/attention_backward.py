"""Gradient of causal attention over whole sequences, in three kernels without atomics.

With x = scale q.k, P = exp(x - lse) and delta = rowsum(dout * out):

    dV = P^T dO        dS = P * (dO V^T - delta)        dK = scale dS^T Q        dQ = scale dS K

1. delta of every row.
2. By key tiles (`attention_backward_keys`): query tiles in ascending order; sums dK and dV and
   writes the rounded dS^T of every pair of tiles.
3. By query tiles, persistent blocks: dQ from the stored dS^T, key tiles in ascending order.

Storing dS costs memory traffic that step 2 hides, and saves computing the scores twice. Every sum
has an order that names only positions of the own sequence: batch composition, packing and grid
order cannot move a bit.
Source: Dao, "FlashAttention-2" (2023), with dQ split off in place of its atomic sum.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_backward_keys import by_key
from pallas_kernels.attention_mma import COMPUTE_REGISTERS, FEED_REGISTERS, launch, operand
from pallas_kernels.attention_pages import SHARED_BYTES, clear_rows, drain, store_rows
from pallas_kernels.attention_parts import (
    COLUMNS,
    accumulate_parts,
    clear,
    leaving,
    load_parts,
    parts,
    tiled,
    zeros,
)
from pallas_kernels.attention_plan import INDEX, LENGTH, PAIRS, ROW, TrainingPlan
from pallas_kernels.attention_rounds import MULTIPROCESSORS, rounds
from pallas_kernels.attention_softmax import LOG2E, ROWS


def _delta_kernel(out, dout, tiles, count, delta, out_smem, dout_smem, ready):
    tile, head = lax.axis_index("tile"), lax.axis_index("head")

    @pl.when(tile < count[0])
    def _():
        rows = pl.ds(tiles[tile, ROW] + tiles[tile, INDEX] * ROWS, ROWS)
        load_parts(out, rows, head, out_smem, 0, ready)
        load_parts(dout, rows, head, dout_smem, 0, ready)
        plgpu.barrier_wait(ready)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        for part in range(out.shape[2] // COLUMNS):
            o, d = (
                plgpu.load(tiled(x).at[0, part], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                for x in (out_smem, dout_smem)
            )
            total += (o * d).sum(axis=1)
        delta[tile, head] = total


def _query_kernel(
    k, ds, tiles, order, count, padding, padding_count, dq, out_smem, tail_smem, k_smem, ds_smem,
    ready, free, *, scale: float, group: int, first_head: int,
):  # fmt: skip
    wg = lax.axis_index("wg")
    ring, width, dim = *ds_smem.shape[:2], k.shape[2]
    keys = tiled(k_smem)
    slot = lambda n: lax.rem(n, ring)  # noqa: E731
    visits, item = rounds(count[0], dq.shape[1] // width)

    def multiply():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def visit(n, done):
            at, unit = item(n)
            tile = order[at]
            index, length = tiles[tile, INDEX], tiles[tile, LENGTH]

            def step(j, acc):
                here = slot(done + j)
                plgpu.barrier_wait(ready.at[here])
                pl.when((j + 1) * ROWS > length)(
                    functools.partial(clear, keys.at[here], j * ROWS, length)
                )
                scores = ds_smem.at[here, wg].transpose((1, 0))
                acc = accumulate_parts(acc, scores, keys.at[here])
                plgpu.barrier_arrive(free.at[here])
                return acc

            acc = lax.fori_loop(0, index + 1, step, zeros(dim))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = [(x * scale).astype(dq.dtype) for x in acc]
            head, first = unit * width + wg, tiles[tile, ROW] + index * ROWS
            high = jnp.minimum(length - index * ROWS, ROWS)

            @pl.when(high == ROWS)
            def _():
                for part, x in enumerate(columns):
                    tiled(out_smem)[wg, part] = x
                plgpu.commit_smem()
                for part in range(len(columns)):
                    target = dq.at[pl.ds(first, ROWS), head, pl.ds(part * COLUMNS, COLUMNS)]
                    plgpu.copy_smem_to_gmem(leaving(out_smem).at[wg, part], target)

            @pl.when(high < ROWS)
            def _():
                store_rows(columns, tail_smem.at[wg], dq, first, head, 0, high)

            return done + index + 1

        lax.fori_loop(0, visits, visit, 0)
        plgpu.wait_smem_to_gmem(0)
        first, stride = lax.axis_index("sm") * width + wg, width * lax.axis_size("sm")
        clear_rows(dq, padding, padding_count[0], tail_smem.at[wg], first, stride)

    def feed():
        plgpu.set_max_registers(FEED_REGISTERS, action="decrease")

        def visit(n, done):
            at, unit = item(n)
            tile = order[at]
            row, index, pair = (tiles[tile, c] for c in (ROW, INDEX, PAIRS))
            pair += lax.div(index * (index + 1), 2)
            kv_head = lax.div(first_head + unit * width, group)

            def load(j, _):
                here = slot(done + j)
                pl.when(done + j >= ring)(lambda: plgpu.barrier_wait(free.at[here]))
                rows = pl.ds(row + j * ROWS, ROWS)
                load_parts(k, rows, kv_head, k_smem, here, ready.at[here])
                for i in range(width):
                    plgpu.copy_gmem_to_smem(
                        ds.at[pair + j, unit * width + i], ds_smem.at[here, i], ready.at[here]
                    )

            lax.fori_loop(0, index + 1, load, None)
            return done + index + 1

        drain(free, lax.fori_loop(0, visits, visit, 0))

    pl.when(wg < width)(multiply)
    pl.when(wg == width)(feed)


def _deltas(out, dout, plan: TrainingPlan) -> jax.Array:
    """float32 [NT, Hq, 64]: sum over D of out * dout for the rows of each tile."""
    heads, dim = out.shape[1:]
    tiles = plan.tiles.shape[0]
    return launch(
        _delta_kernel,
        "attention_delta",
        out_type=jax.ShapeDtypeStruct((tiles, heads, ROWS), jnp.float32),
        grid=(tiles, heads),
        grid_names=("tile", "head"),
        scratch_types=[
            parts(1, ROWS, dim),
            parts(1, ROWS, dim),
            plgpu.Barrier(num_arrivals=2 * dim // COLUMNS),
        ],
    )(out, dout, plan.tiles, plan.count)


def _by_query(k, ds, plan, first_head, heads, group, scale):
    """dQ of every row and query head, in k's dtype [T, heads, D]."""
    dim, tiles = k.shape[2], plan.tiles.shape[0]
    width = 2 if group % 2 == 0 else 1
    fixed = width * ROWS * (dim + COLUMNS) * 2 + 4096
    ring = min(6, (SHARED_BYTES - fixed) // (ROWS * dim * 2 + width * ROWS * ROWS * 2))
    return launch(
        functools.partial(_query_kernel, scale=scale, group=group, first_head=first_head),
        "attention_backward_queries",
        out_type=jax.ShapeDtypeStruct((k.shape[0], heads, dim), k.dtype),
        grid=(min(MULTIPROCESSORS, tiles * heads // width),),
        grid_names=("sm",),
        num_threads=width + 1,
        thread_name="wg",
        scratch_types=[
            parts(width, ROWS, dim),
            plgpu.SMEM((width, ROWS, COLUMNS), k.dtype),
            parts(ring, ROWS, dim),
            operand((ring, width, ROWS, ROWS)),
            plgpu.Barrier(num_arrivals=dim // COLUMNS + width, num_barriers=ring),
            plgpu.Barrier(num_arrivals=width, num_barriers=ring),
        ],
    )(k, ds, plan.tiles, plan.by_query, plan.count, plan.padding, plan.padding_count)


def pair_sum(x: jax.Array) -> jax.Array:
    """Sum over axis 2 by adding neighbours until one is left; an odd one out waits."""
    while x.shape[2] > 1:
        even = x.shape[2] // 2 * 2
        x = jnp.concatenate([x[:, :, 0:even:2] + x[:, :, 1:even:2], x[:, :, even:]], axis=2)
    return x[:, :, 0]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    plan: TrainingPlan,
    *,
    scale: float,
    max_length: int,
    chain: int,
    scratch_bytes: int = 4 << 30,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of causal attention over the whole sequences of `plan`.

    Args:
      q, out, dout: bfloat16 [R, Hq, D]; k, v: bfloat16 [R, Hkv, D]; sequences at the rows that
        `plan.tiles` names; R at least 64; D a multiple of 64, at most 256.
      lse: float32 [T, Hq], natural log-sum-exp, at the rows of the batch.
      scale: factor of q . k. max_length: most tokens of a sequence.
      chain: query heads of a KV head whose parts of dK and dV are summed one after the other.
      scratch_bytes: how much dS to hold at a time; KV heads are taken in turns to stay within it,
        one at least.
    Returns:
      dq bfloat16 [T, Hq, D] and dk, dv float32 [T, Hkv, D] at the rows of the batch, zero at rows
      of no sequence. dk and dv are summed over each KV head's chains as a balanced tree of
      neighbours.
    """
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    longest = -(-max_length // ROWS)
    tiles, tokens = plan.tiles.shape[0], lse.shape[0]
    # c tiles have c (c + 1) / 2 pairs: bounded by the longest's share, or by the tokens
    pairs = min(tiles * (longest + 1) // 2, tiles + tokens * (longest + 2) // 128)
    lse = jnp.swapaxes(lse.at[plan.rows].get(mode="fill", fill_value=0.0) * LOG2E, 1, 2)
    delta = _deltas(out, dout, plan)

    one = pairs * group * ROWS * ROWS * q.dtype.itemsize
    at_once = max(1, min(kv_heads, scratch_bytes // one))
    dq: list[jax.Array] = []
    dk: list[jax.Array] = []
    dv: list[jax.Array] = []
    for first in range(0, kv_heads, at_once):
        span = min(at_once, kv_heads - first)
        first_head, count = first * group, span * group
        k_part, v_part, ds = by_key(
            q, k, v, dout, lse, delta, plan, pairs=pairs, first_head=first_head, heads=count,
            chain=chain, scale=scale,
        )  # fmt: skip
        dq.append(_by_query(k, ds, plan, first_head, count, group, scale))
        for whole, part in ((dk, k_part), (dv, v_part)):
            whole.append(pair_sum(part.reshape(tiles, span, group // chain, ROWS, dim)))

    def to_rows(parts):
        x = jnp.concatenate(parts, axis=1)
        return x.at[plan.tile, :, plan.offset].get(mode="fill", fill_value=0)

    return jnp.concatenate(dq, axis=1)[: plan.tile.shape[0]], to_rows(dk), to_rows(dv)
