"""Attention of tiles of query rows over paged keys and values: prompts, pieces of prompts, training
sequences.

A thread block takes one item after the other: 64 tokens of two query heads that share a KV head (or
128 tokens of one head). Two warpgroups compute, one tile of 64 rows each, taking turns: while one
multiplies on the tensor cores the other does its softmax. A third warpgroup feeds them pages
through a ring of shared memory, those of the next item while this one's results are on their way.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attention_softmax as softmax
from pallas_kernels.attention_mma import (
    COMPUTE_REGISTERS,
    FEED_REGISTERS,
    accumulate,
    operand,
    product,
)
from pallas_kernels.attention_pages import (
    SHARED_BYTES,
    clear_rows,
    clear_stale,
    drain,
    load_block,
    store_rows,
)
from pallas_kernels.attention_plan import (
    TILE_BLOCKS,
    TILE_END,
    TILE_HIGH,
    TILE_LOW,
    TILE_POSITION,
    TILE_ROW,
    TILE_SEQ,
    Blocking,
    Plan,
)
from pallas_kernels.attention_rounds import MULTIPROCESSORS, rounds
from pallas_kernels.attention_softmax import ROWS

PART = 64  # columns of a state that are folded at a time: two whole states would not fit registers
# Columns of a partial tile that leave at a time. Twice as many would cost the second stage of the
# ring at head dimension 256.
TAIL = 64
MANY = 1 << 30  # more blocks than a sequence can have


def heads_per_block(group: int) -> int:
    """Query heads of one KV head that a thread block takes, one a warpgroup."""
    return 2 if group % 2 == 0 else 1


def apart(dim: int) -> bool:
    """Whether results leave from a place of their own, so that the next queries need not wait."""
    return dim <= 128


def stages(dim: int, block: int) -> int:
    """KV blocks in the ring: what fits beside queries, results and the staging of partial tiles."""
    fixed = (2 + 2 * apart(dim)) * ROWS * dim * 2 + 2 * ROWS * TAIL * 2 + 4096
    return min(4, (SHARED_BYTES - fixed) // (2 * block * dim * 2))


def _kernel(
    q, k_pages, v_pages, table, tiles, count, padding, padding_count, out, *rest, scale: float,
    blocking: Blocking, lse: bool, spill: bool,
):  # fmt: skip
    refs = list(rest)
    lse_out = refs.pop(0) if lse else None
    m_spill, mass_spill, acc_spill = (refs.pop(0) for _ in range(3)) if spill else (None,) * 3
    out_smem = refs.pop(0) if apart(q.shape[2]) else refs[0]
    q_smem, k_smem, v_smem, tail_smem, q_ready, q_free, *refs = refs
    k_ready, v_ready, k_free, v_free, turn = refs

    heads, dim = q.shape[1:]
    page, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    per_block = heads_per_block(group)
    units = heads // per_block
    block, per_segment = blocking.kv_block, blocking.kv_segment // blocking.kv_block
    ring = k_smem.shape[0]

    wg = lax.axis_index("wg")
    stride = lax.axis_size("sm")
    visits, item = rounds(count[0], units)
    slot = lambda j: lax.rem(j, ring)  # noqa: E731

    def swap_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        lax.fori_loop(0, visits, attend, 0)
        plgpu.wait_smem_to_gmem(0)
        first = lax.axis_index("sm") * 2 + wg
        clear_rows(out, padding, padding_count[0], tail_smem.at[wg], first, 2 * stride)

    def attend(visit, done):
        tile, unit = item(visit)
        head = unit * per_block + (wg if per_block == 2 else 0)
        first = 0 if per_block == 2 else wg * ROWS  # this warpgroup's first row of the tile
        row = tiles[tile, TILE_ROW] + first
        position = tiles[tile, TILE_POSITION] + first
        low = jnp.clip(tiles[tile, TILE_LOW] - first, 0, ROWS)
        high = jnp.clip(tiles[tile, TILE_HIGH] - first, 0, ROWS)
        end, blocks = tiles[tile, TILE_END], tiles[tile, TILE_BLOCKS]
        # blocks that even the first valid row sees whole
        open_blocks = lax.div(jnp.maximum(position + low + 1, 0), block)

        plgpu.barrier_wait(q_ready.at[wg])
        plgpu.barrier_wait(k_ready.at[slot(done)])

        def step(j, state, masked: bool):
            m, mass, acc = state
            here = slot(done + j)
            # always this warpgroup's queries; but were the index constant, the compiler would keep
            # the descriptors of all their columns in registers that the state needs
            again = q_smem.at[wg + lax.div(j, MANY)]
            s = product(again, k_smem.at[here].transpose((1, 0)), then=swap_turns)
            plgpu.barrier_arrive(k_free.at[here])
            if apart(dim):
                pl.when(j + 1 == blocks)(lambda: plgpu.barrier_arrive(q_free.at[wg]))
            if masked:
                s = softmax.causal(s, position, j * block)
            m, shrink, p = softmax.weigh(m, s, scale, masked=masked)
            acc *= softmax.rows_of(shrink, acc.shape)
            p16 = p.astype(q.dtype)
            # a wide head's row sum waits: the other warpgroup's turn begins the sooner
            if dim <= 128:
                mass = mass * shrink + p.sum(axis=1)
                acc, mass, m, p16 = lax.optimization_barrier((acc, mass, m, p16))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[here])
            plgpu.barrier_wait(turn)
            if dim > 128:
                mass = mass * shrink + p.sum(axis=1)
            if masked:
                pl.when((j + 1) * block > end)(
                    functools.partial(clear_stale, v_smem.at[here], j * block, end)
                )

            def next_keys():
                pl.when(j + 1 < blocks)(lambda: plgpu.barrier_wait(k_ready.at[slot(done + j + 1)]))

            acc = accumulate(acc, p16, v_smem.at[here], then=next_keys)
            plgpu.barrier_arrive(v_free.at[here])
            return m, mass, acc

        def segment(index, _):
            begin = index * per_segment
            stop = jnp.minimum(begin + per_segment, blocks)
            middle = jnp.clip(open_blocks, begin, stop)
            pl.when(wg == 1)(swap_turns)
            state = softmax.empty(dim)
            state = lax.fori_loop(begin, middle, functools.partial(step, masked=False), state)
            state = lax.fori_loop(middle, stop, functools.partial(step, masked=True), state)
            pl.when(wg == 0)(swap_turns)
            if not spill:
                return state
            state = lax.cond(index > 0, functools.partial(folded, state), lambda: state)
            pl.when(stop < blocks)(functools.partial(keep, state))
            return state

        def keep(state):
            rows = pl.ds(first, ROWS)
            m_spill[tile, head, rows], mass_spill[tile, head, rows] = state[:2]
            acc_spill[tile, head, rows] = state[2]

        def folded(state):
            """The kept state of the segments before, then this one's."""
            m, mass, acc = state
            rows, row_layout = pl.ds(first, ROWS), plgpu.Layout.WGMMA.reduce(1)
            m_kept, mass_kept = (
                plgpu.load(x.at[tile, head, rows], layout=row_layout, optimized=False)
                for x in (m_spill, mass_spill)
            )
            parts = []
            for column in range(0, dim, PART):
                acc_kept = plgpu.load(
                    acc_spill.at[tile, head, rows, pl.ds(column, PART)],
                    layout=plgpu.Layout.WGMMA, optimized=False,
                )  # fmt: skip
                part = (m, mass, acc[:, column : column + PART])
                top, total, columns = softmax.fold((m_kept, mass_kept, acc_kept), part)
                parts.append(columns)
            return top, total, jnp.concatenate(parts, axis=1)

        if spill:
            segments = lax.div(blocks + per_segment - 1, per_segment)
            m, mass, acc = lax.fori_loop(0, segments, segment, softmax.empty(dim))
        else:
            m, mass, acc = segment(0, None)

        if lse:
            lse_out[tile, head, pl.ds(first, ROWS)] = softmax.log_sum_exp(m, mass)
        result = softmax.normalise(mass, acc).astype(q.dtype)

        @pl.when((low == 0) & (high == ROWS))
        def _():
            if apart(dim):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
            out_smem[wg] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out.at[pl.ds(row, ROWS), head])
            if not apart(dim):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when((low > 0) | (high < ROWS))
        def _():
            columns = [result[:, at : at + TAIL] for at in range(0, dim, TAIL)]
            store_rows(columns, tail_smem.at[wg], out, row, head, low, high)

        if not apart(dim):
            plgpu.barrier_arrive(q_free.at[wg])
        return done + blocks

    def feed():
        plgpu.set_max_registers(FEED_REGISTERS, action="decrease")
        total = lax.fori_loop(0, visits, load, 0)
        drain(k_free, total)
        drain(v_free, total)
        for i in range(2):
            pl.when(visits > 0)(lambda i=i: plgpu.barrier_wait(q_free.at[i]))

    def load(visit, done):
        tile, unit = item(visit)
        seq, blocks, row = (tiles[tile, c] for c in (TILE_SEQ, TILE_BLOCKS, TILE_ROW))
        kv_head = lax.div(unit * per_block, group)

        def queries():
            for i in range(2):
                pl.when(visit > 0)(lambda i=i: plgpu.barrier_wait(q_free.at[i]))
                head, first = (unit * 2 + i, 0) if per_block == 2 else (unit, i * ROWS)
                source = q.at[pl.ds(row + first, ROWS), head]
                plgpu.copy_gmem_to_smem(source, q_smem.at[i], q_ready.at[i])

        def keys(j, _):
            here = slot(done + j)
            for pages, target, ready, free in (
                (k_pages, k_smem, k_ready, k_free),
                (v_pages, v_smem, v_ready, v_free),
            ):
                pl.when(done + j >= ring)(lambda free=free: plgpu.barrier_wait(free.at[here]))
                load_block(
                    pages, table, seq, kv_head, j, target.at[here], ready.at[here], page=page
                )
            pl.when(j == 0)(queries)  # the ones before are in use for longer than keys are

        lax.fori_loop(0, blocks, keys, None)
        return done + blocks

    pl.when(wg < 2)(compute)
    pl.when(wg == 2)(feed)


def tile_rows(work: Plan, size: int, tokens: int) -> jax.Array:
    """int32 [NT, size]: row of the batch at every used place of a tile, `tokens` at the others."""
    place = jnp.arange(size, dtype=jnp.int32)
    column = lambda c: work.tiles[:, c][:, None]  # noqa: E731
    used = (place >= column(TILE_LOW)) & (place < column(TILE_HIGH))
    used &= jnp.arange(work.tiles.shape[0])[:, None] < work.tile_count
    return jnp.where(used, column(TILE_ROW) + place, tokens)


def prefill(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    work: Plan,
    *,
    scale: float,
    blocking: Blocking,
    lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of every tile of `work`.

    Args:
      q: bfloat16 [T, Hq, D]; T a multiple of 8, at least 64; D a multiple of 64, at most 256.
      k_pages, v_pages: bfloat16 [N, page, Hkv, D]. page_table: int32 [S, M].
      scale: factor of q . k. lse: whether to return the log-sum-exp too.
    Returns:
      out bfloat16 [T, Hq, D], zero at rows of no sequence; natural log-sum-exp float32 [NT, Hq, R]
      of the rows of each tile (rows outside [low, high) hold anything), or None.
    """
    tokens, heads, dim = q.shape
    page, kv_heads = k_pages.shape[1:3]
    block = blocking.kv_block
    tiles = work.tiles.shape[0]
    units = heads // heads_per_block(heads // kv_heads)
    spill = page_table.shape[1] * page > blocking.kv_segment
    ring = stages(dim, block)
    if ring < 1:
        raise ValueError(f"kv_block {block} of head dimension {dim} does not fit shared memory")
    shape = jax.ShapeDtypeStruct
    rows = blocking.tile_tokens
    outs = [shape(q.shape, q.dtype)]
    if lse:
        outs.append(shape((tiles, heads, rows), jnp.float32))
    if spill:
        outs += [shape((tiles, heads, rows), jnp.float32)] * 2
        outs.append(shape((tiles, heads, rows, dim), jnp.float32))
    arrivals = block // min(page, block)
    results = plgpu.kernel(
        functools.partial(
            _kernel,
            scale=scale * softmax.LOG2E,
            blocking=blocking,
            lse=lse,
            spill=spill,
        ),
        out_type=outs,
        grid=(min(MULTIPROCESSORS, tiles * units),),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            *[operand((2, ROWS, dim))] * apart(dim),
            operand((2, ROWS, dim)),
            operand((ring, block, dim)),
            operand((ring, block, dim)),
            plgpu.SMEM((2, ROWS, TAIL), q.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=ring),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=ring),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="attention_prefill",
    )(
        q, k_pages, v_pages, page_table, work.tiles, work.tile_count, work.padding,
        work.padding_count,
    )  # fmt: skip
    return results[0], results[1] if lse else None
