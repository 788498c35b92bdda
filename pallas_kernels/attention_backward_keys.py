"""Attention's gradient by key tiles: dK, dV and the rounded dS^T of every pair of tiles.

A thread block visits the query tiles that see its keys, in ascending order, and query head after
query head of a chain. Two warpgroups compute, a third feeds them.

- Heads up to 128: each warpgroup has a key tile, the two neighbours in their sequence, and its dK
  and dV in registers. Both see the same queries, but for the first query tile, which the later of
  the two key tiles does not see. Blocks are persistent, longest items first.
- Wider heads, of which one warpgroup cannot hold both sums: one key tile; one warpgroup makes P and
  dV, the other dP, dS and dK, with P passed through shared memory.

Both do the same operations in the same order.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_mma import (
    COMPUTE_REGISTERS,
    FEED_REGISTERS,
    LEAST_REGISTERS,
    MOST_REGISTERS,
    launch,
    operand,
)
from pallas_kernels.attention_pages import SHARED_BYTES, drain
from pallas_kernels.attention_parts import (
    COLUMNS,
    accumulate_both,
    accumulate_parts,
    clear,
    load_parts,
    parts,
    rows_product,
    rows_products,
    store,
    tiled,
    zeros,
)
from pallas_kernels.attention_plan import COUNT, FIRST, INDEX, LENGTH, PAIRS, ROW, TrainingPlan
from pallas_kernels.attention_rounds import MULTIPROCESSORS, rounds
from pallas_kernels.attention_softmax import LOG2E, ROWS

TILE_COLUMNS = (ROW, INDEX, COUNT, LENGTH, FIRST, PAIRS)
MANY = 1 << 30  # more steps than a tile has, see attention_prefill
SQUARE = (ROWS, ROWS)


def _columns_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A per-column vector broadcast along the rows of `shape`."""
    return lax.broadcast_in_dim(x, shape, [1])


def _mask(x: jax.Array, key_tile, query_tile, length) -> jax.Array:
    """x [keys, queries], zero where a query cannot see the key or does not exist."""
    keys = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=plgpu.Layout.WGMMA)
    queries = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=plgpu.Layout.WGMMA)
    queries += query_tile * ROWS
    return jnp.where((keys + key_tile * ROWS <= queries) & (queries < length), x, 0.0)


def _vector(ref) -> jax.Array:
    """A value a query [ROWS], as the columns of a tile take it."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def _weights(s: jax.Array, top: jax.Array, scale: float) -> jax.Array:
    """P of the scores s [keys, queries]; top: log-sum-exp in log2 units."""
    return jnp.exp2(s * (scale * LOG2E) - _columns_of(top, SQUARE))


def _hand_out(d: jax.Array, staging, ds, pairs, query_tile, key_tile, head) -> None:
    """Start writing a tile of dS through shared memory, once the one before has left.

    pairs: where the pairs of tiles of this sequence begin.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = d
    plgpu.commit_smem()
    pair = pairs + lax.div(query_tile * (query_tile + 1), 2) + key_tile
    plgpu.copy_smem_to_gmem(staging, ds.at[pair, head])


def _one_tile_kernel(
    q, k, v, dout, lse, delta, tiles, order, count, dk, dv, ds, k_smem, v_smem, q_smem, dout_smem,
    lse_smem, delta_smem, p_smem, ds_smem, kv_ready, q_ready, dout_ready, free, p_ready, p_free, *,
    scale: float, first_head: int, chain: int,
):  # fmt: skip
    wg = lax.axis_index("wg")
    at, unit = lax.axis_index("tile"), lax.axis_index("unit")
    kv_head = lax.div(first_head + unit * chain, q.shape[1] // k.shape[1])
    ring, dim = lse_smem.shape[0], q.shape[2]
    slot = lambda n: lax.rem(n, ring)  # noqa: E731
    keys_, values_, queries, douts = map(tiled, (k_smem, v_smem, q_smem, dout_smem))

    def work():
        tile = order[at]
        row, index, total, length, first, pairs = (tiles[tile, c] for c in TILE_COLUMNS)
        visits = total - index  # query tiles that see these keys
        steps = visits * chain

        def visit(n):
            """Query tile and query head (of those at hand) of step n."""
            return index + lax.rem(n, visits), unit * chain + lax.div(n, visits)

        def masked(x, i):
            edge = (i == index) | ((i + 1) * ROWS > length)
            return lax.cond(edge, lambda: _mask(x, index, i, length), lambda: x)

        def clear_end(ref, i):
            pl.when((i + 1) * ROWS > length)(functools.partial(clear, ref, i * ROWS, length))

        def values():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(kv_ready)

            def step(n, acc):
                (i, _), here = visit(n), slot(n)
                plgpu.barrier_wait(q_ready.at[here])
                x = rows_product(keys_.at[lax.div(n, MANY)], queries.at[here])
                p = masked(_weights(x, _vector(lse_smem.at[here]), scale), i)
                pl.when(n > 0)(lambda: plgpu.barrier_wait(p_free))
                p_smem[...] = p
                plgpu.barrier_arrive(p_ready)
                plgpu.barrier_wait(dout_ready.at[here])
                clear_end(douts.at[here], i)
                acc = accumulate_parts(acc, p.astype(q.dtype), douts.at[here])
                plgpu.barrier_arrive(free.at[here])
                return acc

            store(dv.at[tile, unit], lax.fori_loop(0, steps, step, zeros(dim)))
            plgpu.barrier_wait(p_free)

        def keys():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(kv_ready)

            def step(n, acc):
                (i, head), here = visit(n), slot(n)
                plgpu.barrier_wait(dout_ready.at[here])
                dp = rows_product(values_.at[lax.div(n, MANY)], douts.at[here])
                shift = _vector(delta_smem.at[here])
                plgpu.barrier_wait(p_ready)
                p = plgpu.load(p_smem, layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(p_free)
                d = masked(p * (dp - _columns_of(shift, SQUARE)), i).astype(q.dtype)
                _hand_out(d, ds_smem, ds, pairs, i, index, head)
                plgpu.barrier_wait(q_ready.at[here])
                clear_end(queries.at[here], i)
                acc = accumulate_parts(acc, d, queries.at[here])
                plgpu.barrier_arrive(free.at[here])
                return acc

            acc = lax.fori_loop(0, steps, step, zeros(dim))
            store(dk.at[tile, unit], tuple(part * scale for part in acc))
            plgpu.wait_smem_to_gmem(0)

        def feed():
            plgpu.set_max_registers(FEED_REGISTERS, action="decrease")
            rows = pl.ds(row + index * ROWS, ROWS)
            load_parts(k, rows, kv_head, k_smem, 0, kv_ready)
            load_parts(v, rows, kv_head, v_smem, 0, kv_ready)

            def load(n, _):
                (i, head), here = visit(n), slot(n)
                head += first_head
                pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[here]))
                rows = pl.ds(row + i * ROWS, ROWS)
                load_parts(q, rows, head, q_smem, here, q_ready.at[here])
                plgpu.copy_gmem_to_smem(
                    lse.at[first + i, head], lse_smem.at[here], q_ready.at[here]
                )
                load_parts(dout, rows, head, dout_smem, here, dout_ready.at[here])
                plgpu.copy_gmem_to_smem(
                    delta.at[first + i, head], delta_smem.at[here], dout_ready.at[here]
                )

            lax.fori_loop(0, steps, load, None)
            drain(free, steps)

        pl.when(wg == 0)(values)
        pl.when(wg == 1)(keys)
        pl.when(wg == 2)(feed)

    pl.when(at < count[0])(work)


def _two_tiles_kernel(
    q, k, v, dout, lse, delta, tiles, order, count, dk, dv, ds, k_smem, v_smem, q_smem, dout_smem,
    lse_smem, delta_smem, ds_smem, kv_ready, kv_free, ready, free, *, scale: float,
    first_head: int, chain: int,
):  # fmt: skip
    wg = lax.axis_index("wg")
    ring, dim = lse_smem.shape[0], q.shape[2]
    slot = lambda n: lax.rem(n, ring)  # noqa: E731
    turns, item = rounds(count[0], dk.shape[1])

    def compute():
        plgpu.set_max_registers(MOST_REGISTERS, action="increase")
        lax.fori_loop(0, turns, visit, 0)
        plgpu.wait_smem_to_gmem(0)

    def visit(number, done):
        at, unit = item(number)
        tile = order[at]
        _, index, total, length, _, pairs = (tiles[tile, c] for c in TILE_COLUMNS)
        visits = total - index  # query tiles that see the first tile of these keys
        whole = lax.div(length, ROWS) - index  # of them, those without an end
        mine = index + wg

        plgpu.barrier_wait(kv_ready.at[wg])

        def step(j, sums, c, first, edge: bool):
            i, here, head = index + j, slot(first + j), unit * chain + c
            queries, douts = tiled(q_smem).at[here], tiled(dout_smem).at[here]
            masked = (lambda x: _mask(x, mine, i, length)) if edge else lambda x: x
            plgpu.barrier_wait(ready.at[here])
            if edge:

                @pl.when((i + 1) * ROWS > length)
                def _():
                    clear(queries, i * ROWS, length)
                    clear(douts, i * ROWS, length)

            again = wg + lax.div(j, MANY)

            def weights(s):
                return masked(_weights(s, _vector(lse_smem.at[here]), scale))

            p, dp = rows_products(
                (tiled(k_smem).at[again], queries), (tiled(v_smem).at[again], douts), weights
            )
            # the next keys may come while these sums are finished and leave
            pl.when((j + 1 == visits) & (c + 1 == chain))(
                lambda: plgpu.barrier_arrive(kv_free.at[wg])
            )

            def gradient():
                shift = _vector(delta_smem.at[here])
                return masked(p * (dp - _columns_of(shift, SQUARE))).astype(q.dtype)

            def keep(d):
                _hand_out(d, ds_smem.at[wg], ds, pairs, i, mine, head)

            sums = accumulate_both(sums, p.astype(q.dtype), douts, gradient, queries, keep)
            plgpu.barrier_arrive(free.at[here])
            return sums

        def head(c, sums):
            first = done + c * visits

            @pl.when(wg == 1)
            def _():  # the first query tile sees no key of the second tile
                plgpu.barrier_wait(ready.at[slot(first)])
                plgpu.barrier_arrive(free.at[slot(first)])

            at = functools.partial(step, c=c, first=first)
            stop = jnp.minimum(wg + 1, visits)
            middle = jnp.maximum(whole, stop)
            sums = lax.fori_loop(wg, stop, functools.partial(at, edge=True), sums)
            sums = lax.fori_loop(stop, middle, functools.partial(at, edge=False), sums)
            return lax.fori_loop(middle, visits, functools.partial(at, edge=True), sums)

        sums = (zeros(dim), zeros(dim))
        sums = head(0, sums) if chain == 1 else lax.fori_loop(0, chain, head, sums)
        pl.when(mine >= total)(lambda: plgpu.barrier_arrive(kv_free.at[wg]))

        @pl.when(mine < total)
        def _():
            store(dv.at[tile + wg, unit], sums[0])
            store(dk.at[tile + wg, unit], tuple(part * scale for part in sums[1]))

        return done + chain * visits

    def feed():
        plgpu.set_max_registers(LEAST_REGISTERS, action="decrease")
        drain(free, lax.fori_loop(0, turns, load, 0))
        for i in range(2):
            pl.when(turns > 0)(lambda i=i: plgpu.barrier_wait(kv_free.at[i]))

    def load(number, done):
        at, unit = item(number)
        tile = order[at]
        row, index, total, _, first, _ = (tiles[tile, c] for c in TILE_COLUMNS)
        visits = total - index
        kv_head = lax.div(first_head + unit * chain, q.shape[1] // k.shape[1])

        def keys():
            for i in range(2):
                pl.when(number > 0)(lambda i=i: plgpu.barrier_wait(kv_free.at[i]))
                rows = pl.ds(row + (index + i) * ROWS, ROWS)
                load_parts(k, rows, kv_head, k_smem, i, kv_ready.at[i])
                load_parts(v, rows, kv_head, v_smem, i, kv_ready.at[i])

        def one(n, _):
            here, i = slot(done + n), index + lax.rem(n, visits)
            head = unit * chain + lax.div(n, visits) + first_head
            pl.when(done + n >= ring)(lambda: plgpu.barrier_wait(free.at[here]))
            rows = pl.ds(row + i * ROWS, ROWS)
            load_parts(q, rows, head, q_smem, here, ready.at[here])
            load_parts(dout, rows, head, dout_smem, here, ready.at[here])
            for source, target in ((lse, lse_smem), (delta, delta_smem)):
                plgpu.copy_gmem_to_smem(source.at[first + i, head], target.at[here], ready.at[here])
            pl.when(n == 0)(keys)

        lax.fori_loop(0, visits * chain, one, None)
        return done + visits * chain

    pl.when(wg < 2)(compute)
    pl.when(wg == 2)(feed)


def _one_tile(q, k, v, dout, lse, delta, plan, pairs, first_head, heads, chain, scale):
    dim, tiles = q.shape[2], plan.tiles.shape[0]
    copies = dim // COLUMNS
    fixed = 2 * ROWS * dim * 2 + ROWS * ROWS * 6 + 8192
    ring = min(4, (SHARED_BYTES - fixed) // (2 * ROWS * dim * 2))
    shape = jax.ShapeDtypeStruct
    return launch(
        functools.partial(_one_tile_kernel, scale=scale, first_head=first_head, chain=chain),
        "attention_backward_keys",
        out_type=[
            shape((tiles, heads // chain, ROWS, dim), jnp.float32),
            shape((tiles, heads // chain, ROWS, dim), jnp.float32),
            shape((pairs, heads, ROWS, ROWS), q.dtype),
        ],
        grid=(tiles, heads // chain),
        grid_names=("tile", "unit"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            parts(1, ROWS, dim),
            parts(1, ROWS, dim),
            parts(ring, ROWS, dim),
            parts(ring, ROWS, dim),
            plgpu.SMEM((ring, ROWS), jnp.float32),
            plgpu.SMEM((ring, ROWS), jnp.float32),
            operand((ROWS, ROWS), jnp.float32),
            operand((ROWS, ROWS)),
            plgpu.Barrier(num_arrivals=2 * copies),
            plgpu.Barrier(num_arrivals=copies + 1, num_barriers=ring),
            plgpu.Barrier(num_arrivals=copies + 1, num_barriers=ring),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )(q, k, v, dout, lse, delta, plan.tiles, plan.by_key, plan.count)


def _two_tiles(q, k, v, dout, lse, delta, plan, pairs, first_head, heads, chain, scale):
    dim, tiles = q.shape[2], plan.tiles.shape[0]
    copies = dim // COLUMNS
    fixed = 4 * ROWS * dim * 2 + 2 * ROWS * ROWS * 2 + 8192
    ring = min(4, (SHARED_BYTES - fixed) // (2 * ROWS * dim * 2))
    shape, units = jax.ShapeDtypeStruct, heads // chain
    return launch(
        functools.partial(_two_tiles_kernel, scale=scale, first_head=first_head, chain=chain),
        "attention_backward_keys",
        out_type=[
            shape((tiles, units, ROWS, dim), jnp.float32),
            shape((tiles, units, ROWS, dim), jnp.float32),
            shape((pairs, heads, ROWS, ROWS), q.dtype),
        ],
        grid=(min(MULTIPROCESSORS, tiles * units),),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            parts(2, ROWS, dim),
            parts(2, ROWS, dim),
            parts(ring, ROWS, dim),
            parts(ring, ROWS, dim),
            plgpu.SMEM((ring, ROWS), jnp.float32),
            plgpu.SMEM((ring, ROWS), jnp.float32),
            operand((2, ROWS, ROWS)),
            plgpu.Barrier(num_arrivals=2 * copies, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2 * copies + 2, num_barriers=ring),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        ],
    )(q, k, v, dout, lse, delta, plan.tiles, plan.by_two_keys, plan.two_count)


def by_key(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    plan: TrainingPlan,
    *,
    pairs: int,
    first_head: int,
    heads: int,
    chain: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dK and dV float32 [NT, heads / chain, 64, D] of every tile, dS^T [pairs, heads, 64, 64].

    Args:
      q, dout: bfloat16 [R, Hq, D]; k, v: bfloat16 [R, Hkv, D]; lse in log2 units, delta: float32
        [NT, Hq, 64].
      pairs: how many pairs of tiles there may be. first_head, heads: which query heads. chain: how
        many of them are summed one after the other. scale: factor of q . k.
    """
    run = _two_tiles if q.shape[2] <= 128 else _one_tile
    return run(q, k, v, dout, lse, delta, plan, pairs, first_head, heads, chain, scale)
