"""Attention of sequences that contribute one token, over paged keys and values.

A long context is cut into KV segments that different thread blocks visit at once; a second kernel
folds their states in order. The query heads of one KV head fill the first rows of the 64-row tile
that prefill uses, in the same register layout, so a decoded row takes the steps that it would take
in a prefill tile. The idle rows cost
nothing: reading the keys takes longer than multiplying them.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attention_softmax as softmax
from pallas_kernels.attention_mma import accumulate, operand, product
from pallas_kernels.attention_pages import SHARED_BYTES, clear_stale, drain, load_block
from pallas_kernels.attention_plan import (
    ITEM_BLOCKS,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_SEGMENT,
    ITEM_SEQ,
    ROW_ALIGNMENT,
    Blocking,
    Plan,
)
from pallas_kernels.attention_softmax import ROWS

PART = 64  # columns of a float32 state that leave through shared memory at a time


def padded_dim(dim: int) -> int:
    """Columns of a stored partial state: a multiple of a warpgroup's threads."""
    return -(-dim // 128) * 128


def _decode_kernel(
    q, k_pages, v_pages, table, items, count, *rest, scale: float, blocking: Blocking, whole: bool,
    group: int, rows: int,
):  # fmt: skip
    refs = list(rest)
    if whole:
        out = refs.pop(0)
    else:
        m_out, l_out, acc_out = (refs.pop(0) for _ in range(3))
    q_smem, k_smem, v_smem, stage, q_ready, k_ready, v_ready, k_free, v_free = refs

    dim = q.shape[2]
    page, kv_heads = k_pages.shape[1:3]
    block, per_segment = blocking.kv_block, blocking.kv_segment // blocking.kv_block
    ring = k_smem.shape[0]
    stride = lax.axis_size("sm")
    work = count[0] * kv_heads
    slot = lambda n: lax.rem(n, ring)  # noqa: E731

    def compute():
        plgpu.set_max_registers(240, action="increase")
        for column in range(0, dim, PART):  # idle rows: defined numbers
            q_smem[:, column : column + PART] = plgpu.layout_cast(
                jnp.zeros((ROWS, PART), q.dtype), plgpu.Layout.WGMMA
            )
        plgpu.commit_smem()

        def one(visit, done):
            index = lax.axis_index("sm") + visit * stride
            item, kv_head = lax.div(index, kv_heads), lax.rem(index, kv_heads)
            seq, segment, blocks = (items[item, c] for c in (ITEM_SEQ, ITEM_SEGMENT, ITEM_BLOCKS))
            position = items[item, ITEM_POSITION]
            first = segment * per_segment
            open_blocks = jnp.clip(lax.div(position + 1, block) - first, 0, blocks)
            plgpu.copy_gmem_to_smem(
                q.at[items[item, ITEM_ROW], pl.ds(kv_head * group, rows)],
                q_smem.at[pl.ds(0, rows)],
                q_ready,
            )
            plgpu.barrier_wait(q_ready)

            def step(j, state, masked: bool):
                m, mass, acc = state
                here, key = slot(done + j), (first + j) * block
                plgpu.barrier_wait(k_ready.at[here])
                s = product(q_smem, k_smem.at[here].transpose((1, 0)))
                plgpu.barrier_arrive(k_free.at[here])
                if masked:
                    keys = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                    s = jnp.where(keys + key <= position, s, -jnp.inf)
                m, shrink, p = softmax.weigh(m, s, scale, masked=masked)
                acc *= softmax.rows_of(shrink, acc.shape)
                mass = mass * shrink + p.sum(axis=1)
                plgpu.barrier_wait(v_ready.at[here])
                if masked:
                    pl.when(key + block > position + 1)(
                        functools.partial(clear_stale, v_smem.at[here], key, position + 1)
                    )
                acc = accumulate(acc, p.astype(q.dtype), v_smem.at[here])
                plgpu.barrier_arrive(v_free.at[here])
                return m, mass, acc

            state = softmax.empty(dim)
            state = lax.fori_loop(0, open_blocks, functools.partial(step, masked=False), state)
            m, mass, acc = lax.fori_loop(
                open_blocks, blocks, functools.partial(step, masked=True), state
            )
            if whole:
                stage[...] = softmax.normalise(mass, acc).astype(q.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stage.at[pl.ds(0, rows)], out.at[seq, kv_head])
                plgpu.wait_smem_to_gmem(0)
            else:
                m_out[seq, segment, kv_head], l_out[seq, segment, kv_head] = m, mass
                for column in range(0, dim, PART):
                    stage[...] = acc[:, column : column + PART]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        stage.at[pl.ds(0, rows)],
                        acc_out.at[seq, segment, kv_head, :, pl.ds(column, PART)],
                    )
                    plgpu.wait_smem_to_gmem(0)
            return done + blocks

        lax.fori_loop(0, visits, one, 0)

    def feed():
        plgpu.set_max_registers(40, action="decrease")

        def one(visit, done):
            index = lax.axis_index("sm") + visit * stride
            item, kv_head = lax.div(index, kv_heads), lax.rem(index, kv_heads)
            seq, segment, blocks = (items[item, c] for c in (ITEM_SEQ, ITEM_SEGMENT, ITEM_BLOCKS))

            def load(j, _):
                n = done + j
                for pages, ring_smem, ready, free in (
                    (k_pages, k_smem, k_ready, k_free),
                    (v_pages, v_smem, v_ready, v_free),
                ):
                    pl.when(n >= ring)(lambda free=free: plgpu.barrier_wait(free.at[slot(n)]))
                    load_block(
                        pages, table, seq, kv_head, segment * per_segment + j,
                        ring_smem.at[slot(n)], ready.at[slot(n)], page=page,
                    )  # fmt: skip

            lax.fori_loop(0, blocks, load, None)
            return done + blocks

        total = lax.fori_loop(0, visits, one, 0)
        drain(k_free, total)
        drain(v_free, total)

    visits = lax.div(work - lax.axis_index("sm") + stride - 1, stride)
    wg = lax.axis_index("wg")
    pl.when(wg == 0)(compute)
    pl.when(wg == 1)(feed)


def _combine_kernel(m_in, l_in, acc_in, segments, out):
    """Fold the states of one query head's segments in order."""
    seq, kv_head, row = (lax.axis_index(name) for name in ("seq", "kv_head", "row"))
    width = acc_in.shape[-1]

    def load(segment):
        at = (seq, segment, kv_head, row)
        full = lambda x: lax.broadcast_in_dim(x, (width,), ())  # noqa: E731
        return full(m_in[at]), full(l_in[at]), acc_in[at]

    @pl.when(segments[seq] > 0)
    def _():
        def add(segment, a):
            b = load(segment)
            top = jnp.maximum(a[0], b[0])
            u, v = jnp.exp2(a[0] - top), jnp.exp2(b[0] - top)
            return top, a[1] * u + b[1] * v, a[2] * u + b[2] * v

        _, mass, acc = lax.fori_loop(1, segments[seq], add, load(0))
        out[seq, kv_head, row] = (acc * (1.0 / mass) + 0.0).astype(out.dtype)


def decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    work: Plan,
    *,
    scale: float,
    blocking: Blocking,
    blocks: int = 132,
) -> jax.Array:
    """Attention of every item of `work`: sequences with one new token.

    Args:
      q: bfloat16 [T, Hq, D]; D a multiple of 64, at most 256.
      k_pages, v_pages: bfloat16 [N, page, Hkv, D]. page_table: int32 [S, M].
      scale: factor of q . k. blocks: most thread blocks, one for each multiprocessor.
    Returns:
      bfloat16 [S, Hq, D]: the row of each sequence that has an item; anything for every other.
    """
    sequences, columns = page_table.shape
    heads, dim = q.shape[1:]
    page, kv_heads = k_pages.shape[1:3]
    block, group = blocking.kv_block, heads // kv_heads
    rows = -(-group // ROW_ALIGNMENT) * ROW_ALIGNMENT
    if rows > ROWS:
        raise ValueError(f"{group} query heads of a KV head do not fit a tile of {ROWS} rows")
    stride = group  # from one KV head's queries to the next's
    inside = ROW_ALIGNMENT % group == 0 and (heads <= ROW_ALIGNMENT or heads % ROW_ALIGNMENT == 0)
    if group % ROW_ALIGNMENT and not inside:  # a group would straddle shared-memory tiles: pad it
        q = jnp.pad(
            q.reshape(-1, kv_heads, group, dim), ((0, 0), (0, 0), (0, rows - group), (0, 0))
        )
        q, stride = q.reshape(-1, kv_heads * rows, dim), rows
    segments = -(-columns * page // blocking.kv_segment)
    whole = segments == 1
    shape = jax.ShapeDtypeStruct
    if whole:
        outs = [shape((sequences, kv_heads, rows, dim), q.dtype)]
        stage = operand((ROWS, dim))
    else:
        state = (sequences, segments, kv_heads)
        outs = [
            shape((*state, ROWS), jnp.float32),
            shape((*state, ROWS), jnp.float32),
            shape((*state, rows, padded_dim(dim)), jnp.float32),
        ]
        stage = operand((ROWS, PART), jnp.float32)
    fixed = ROWS * dim * 2 + (ROWS * dim * 2 if whole else ROWS * PART * 4) + 4096
    ring = min(8, (SHARED_BYTES - fixed) // (2 * block * dim * 2))
    arrivals = block // min(page, block)
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    results = plgpu.kernel(
        functools.partial(
            _decode_kernel,
            scale=scale * softmax.LOG2E,
            blocking=blocking,
            whole=whole,
            group=stride,
            rows=rows,
        ),  # fmt: skip
        out_type=outs,
        grid=(min(blocks, work.items.shape[0] * kv_heads),),
        grid_names=("sm",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            operand((ROWS, dim)),
            operand((ring, block, dim)),
            operand((ring, block, dim)),
            stage,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=ring),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
        ],
        compiler_params=params,
        kernel_name="attention_decode",
    )(q, k_pages, v_pages, page_table, work.items, work.item_count)
    if whole:
        [out] = results
    else:
        out = plgpu.kernel(
            _combine_kernel,
            out_type=shape((sequences, kv_heads, rows, padded_dim(dim)), q.dtype),
            grid=(sequences, kv_heads, rows),
            grid_names=("seq", "kv_head", "row"),
            compiler_params=params,
            kernel_name="attention_combine",
        )(*results, work.segments)
    return out[:, :, :group, :dim].reshape(sequences, heads, dim)
