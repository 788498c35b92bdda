"""Gradient of causal attention over whole sequences, in three kernels without atomics.

With x = scale q.k, P = exp(x - lse) and delta = rowsum(dout * out):

    dV = P^T dO        dS = P * (dO V^T - delta)        dK = scale dS^T Q        dQ = scale dS K

1. delta of every row.
2. By key tiles: query tiles in ascending order; sums dK and dV and writes the rounded dS^T of every
   pair of tiles. One warpgroup makes P and dV, a second dP, dS and dK; a third feeds them.
3. By query tiles: dQ from the stored dS^T, key tiles in ascending order.

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

from pallas_kernels.attention_mma import (
    COLUMNS,
    COMPUTE_REGISTERS,
    FEED_REGISTERS,
    LEAST_REGISTERS,
    MOST_REGISTERS,
    Parts,
    accumulate_both,
    accumulate_parts,
    leaving,
    load_parts,
    operand,
    parts,
    rows_product,
    rows_products,
    tiled,
)
from pallas_kernels.attention_pages import (
    SHARED_BYTES,
    clear_rows,
    clear_stale,
    drain,
    store_rows,
)
from pallas_kernels.attention_plan import COUNT, FIRST, INDEX, LENGTH, PAIRS, ROW, TrainingPlan
from pallas_kernels.attention_rounds import MULTIPROCESSORS, rounds
from pallas_kernels.attention_softmax import LOG2E, ROWS

TILE_COLUMNS = (ROW, INDEX, COUNT, LENGTH, FIRST, PAIRS)
MANY = 1 << 30  # more steps than a tile has, see attention_prefill


def _call(body, name: str, **kwargs):
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name=name,
        **kwargs,
    )


def _columns_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A per-column vector broadcast along the rows of `shape`."""
    return lax.broadcast_in_dim(x, shape, [1])


def zeros(dim: int) -> Parts:
    """An empty accumulator [ROWS, dim]."""
    zero = lambda: jnp.zeros((ROWS, COLUMNS), jnp.float32)  # noqa: E731
    return tuple(plgpu.layout_cast(zero(), plgpu.Layout.WGMMA) for _ in range(dim // COLUMNS))


def _store(target, sums: Parts) -> None:
    """Write columns in parts to target [ROWS, D] in device memory."""
    for part, x in enumerate(sums):
        target[:, part * COLUMNS : (part + 1) * COLUMNS] = x


def _clear(values, first: jax.Array, end: jax.Array) -> None:
    """`clear_stale` of a tile in parts."""
    for part in range(values.shape[0]):
        clear_stale(values.at[part], first, end)


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


def _key_kernel(
    q, k, v, dout, lse, delta, tiles, order, count, dk, dv, ds, k_smem, v_smem, q_smem, dout_smem,
    lse_smem, delta_smem, p_smem, ds_smem, kv_ready, q_ready, dout_ready, free, p_ready, p_free, *,
    scale: float, first_head: int, chain: int,
):  # fmt: skip
    wg = lax.axis_index("wg")
    at, unit = lax.axis_index("tile"), lax.axis_index("unit")
    kv_head = lax.div(first_head + unit * chain, q.shape[1] // k.shape[1])
    ring, dim = lse_smem.shape[0], q.shape[2]
    square = (ROWS, ROWS)
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

        def mask(x, i):
            """x [keys, queries], zero where a query cannot see the key or does not exist."""
            keys = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=plgpu.Layout.WGMMA)
            queries = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=plgpu.Layout.WGMMA)
            queries += i * ROWS
            return jnp.where((keys + index * ROWS <= queries) & (queries < length), x, 0.0)

        def masked(x, i):
            edge = (i == index) | ((i + 1) * ROWS > length)
            return lax.cond(edge, lambda: mask(x, i), lambda: x)

        def clear(ref, i):
            pl.when((i + 1) * ROWS > length)(functools.partial(_clear, ref, i * ROWS, length))

        def values():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(kv_ready)

            def step(n, acc):
                (i, _), here = visit(n), slot(n)
                plgpu.barrier_wait(q_ready.at[here])
                x = rows_product(keys_.at[lax.div(n, MANY)], queries.at[here])
                top = plgpu.load(lse_smem.at[here], layout=plgpu.Layout.WGMMA.reduce(0))
                p = masked(jnp.exp2(x * (scale * LOG2E) - _columns_of(top, square)), i)
                pl.when(n > 0)(lambda: plgpu.barrier_wait(p_free))
                p_smem[...] = p
                plgpu.barrier_arrive(p_ready)
                plgpu.barrier_wait(dout_ready.at[here])
                clear(douts.at[here], i)
                acc = accumulate_parts(acc, p.astype(q.dtype), douts.at[here])
                plgpu.barrier_arrive(free.at[here])
                return acc

            _store(dv.at[tile, unit], lax.fori_loop(0, steps, step, zeros(dim)))
            plgpu.barrier_wait(p_free)

        def keys():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(kv_ready)

            def step(n, acc):
                (i, head), here = visit(n), slot(n)
                plgpu.barrier_wait(dout_ready.at[here])
                dp = rows_product(values_.at[lax.div(n, MANY)], douts.at[here])
                shift = plgpu.load(delta_smem.at[here], layout=plgpu.Layout.WGMMA.reduce(0))
                plgpu.barrier_wait(p_ready)
                p = plgpu.load(p_smem, layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(p_free)
                d = masked(p * (dp - _columns_of(shift, square)), i).astype(q.dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ds_smem[...] = d
                plgpu.commit_smem()
                pair = pairs + lax.div(i * (i + 1), 2) + index
                plgpu.copy_smem_to_gmem(ds_smem, ds.at[pair, head])
                plgpu.barrier_wait(q_ready.at[here])
                clear(queries.at[here], i)
                acc = accumulate_parts(acc, d, queries.at[here])
                plgpu.barrier_arrive(free.at[here])
                return acc

            acc = lax.fori_loop(0, steps, step, zeros(dim))
            _store(dk.at[tile, unit], tuple(part * scale for part in acc))
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


def _two_keys_kernel(
    q, k, v, dout, lse, delta, tiles, order, count, dk, dv, ds, k_smem, v_smem, q_smem, dout_smem,
    lse_smem, delta_smem, ds_smem, kv_ready, kv_free, ready, free, *, scale: float,
    first_head: int, chain: int,
):  # fmt: skip
    """`_key_kernel` for heads whose two sums fit one warpgroup: each of two has a key tile."""
    wg = lax.axis_index("wg")
    ring, dim = lse_smem.shape[0], q.shape[2]
    square = (ROWS, ROWS)
    slot = lambda n: lax.rem(n, ring)  # noqa: E731
    rounds_, item = rounds(count[0], dk.shape[1])

    def compute():
        plgpu.set_max_registers(MOST_REGISTERS, action="increase")
        lax.fori_loop(0, rounds_, visit, 0)
        plgpu.wait_smem_to_gmem(0)

    def visit(number, done):
        at, unit = item(number)
        tile = order[at]
        _, index, total, length, _, pairs = (tiles[tile, c] for c in TILE_COLUMNS)
        visits = total - index  # query tiles that see the first tile of these keys
        whole = lax.div(length, ROWS) - index  # of them, those without an end
        mine = index + wg

        def mask(x, i):
            """x [keys, queries], zero where a query cannot see the key or does not exist."""
            keys = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=plgpu.Layout.WGMMA)
            queries = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=plgpu.Layout.WGMMA)
            queries += i * ROWS
            return jnp.where((keys + mine * ROWS <= queries) & (queries < length), x, 0.0)

        plgpu.barrier_wait(kv_ready.at[wg])

        def step(j, sums, c, first, edge: bool):
            i, here, head = index + j, slot(first + j), unit * chain + c
            queries, douts = tiled(q_smem).at[here], tiled(dout_smem).at[here]
            masked = (lambda x: mask(x, i)) if edge else lambda x: x
            plgpu.barrier_wait(ready.at[here])
            if edge:

                @pl.when((i + 1) * ROWS > length)
                def _():
                    _clear(queries, i * ROWS, length)
                    _clear(douts, i * ROWS, length)

            again = wg + lax.div(j, MANY)

            def weights(s):
                top = plgpu.load(lse_smem.at[here], layout=plgpu.Layout.WGMMA.reduce(0))
                return masked(jnp.exp2(s * (scale * LOG2E) - _columns_of(top, square)))

            p, dp = rows_products(
                (tiled(k_smem).at[again], queries), (tiled(v_smem).at[again], douts), weights
            )
            # the next keys may come while these sums are finished and leave
            pl.when((j + 1 == visits) & (c + 1 == chain))(
                lambda: plgpu.barrier_arrive(kv_free.at[wg])
            )

            def gradient():
                shift = plgpu.load(delta_smem.at[here], layout=plgpu.Layout.WGMMA.reduce(0))
                return masked(p * (dp - _columns_of(shift, square))).astype(q.dtype)

            def keep(d):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ds_smem[wg] = d
                plgpu.commit_smem()
                pair = pairs + lax.div(i * (i + 1), 2) + mine
                plgpu.copy_smem_to_gmem(ds_smem.at[wg], ds.at[pair, head])

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
            _store(dv.at[tile + wg, unit], sums[0])
            _store(dk.at[tile + wg, unit], tuple(part * scale for part in sums[1]))

        return done + chain * visits

    def feed():
        plgpu.set_max_registers(LEAST_REGISTERS, action="decrease")
        drain(free, lax.fori_loop(0, rounds_, load, 0))
        for i in range(2):
            pl.when(rounds_ > 0)(lambda i=i: plgpu.barrier_wait(kv_free.at[i]))

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
                plgpu.copy_gmem_to_smem(
                    source.at[first + i, head], target.at[here], ready.at[here]
                )
            pl.when(n == 0)(keys)

        lax.fori_loop(0, visits * chain, one, None)
        return done + visits * chain

    pl.when(wg < 2)(compute)
    pl.when(wg == 2)(feed)


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
                    functools.partial(_clear, keys.at[here], j * ROWS, length)
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
    return _call(
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


def _by_key(q, k, v, dout, lse, delta, plan, pairs, first_head, heads, chain, scale):
    """dK and dV [NT, heads / chain, 64, D] float32 of every tile, dS^T [pairs, heads, 64, 64]."""
    dim, tiles = q.shape[2], plan.tiles.shape[0]
    copies = dim // COLUMNS
    fixed = 2 * ROWS * dim * 2 + ROWS * ROWS * 6 + 8192
    ring = min(4, (SHARED_BYTES - fixed) // (2 * ROWS * dim * 2))
    shape = jax.ShapeDtypeStruct
    return _call(
        functools.partial(_key_kernel, scale=scale, first_head=first_head, chain=chain),
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


def _by_two_keys(q, k, v, dout, lse, delta, plan, pairs, first_head, heads, chain, scale):
    """What `_by_key` returns."""
    dim, tiles = q.shape[2], plan.tiles.shape[0]
    copies = dim // COLUMNS
    fixed = 4 * ROWS * dim * 2 + 2 * ROWS * ROWS * 2 + 8192
    ring = min(4, (SHARED_BYTES - fixed) // (2 * ROWS * dim * 2))
    shape, units = jax.ShapeDtypeStruct, heads // chain
    return _call(
        functools.partial(_two_keys_kernel, scale=scale, first_head=first_head, chain=chain),
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


def _by_query(k, ds, plan, first_head, heads, group, scale):
    """dQ of every row and query head, in k's dtype [T, heads, D]."""
    dim, tiles = k.shape[2], plan.tiles.shape[0]
    width = 2 if group % 2 == 0 else 1
    fixed = width * ROWS * (dim + COLUMNS) * 2 + 4096
    ring = min(6, (SHARED_BYTES - fixed) // (ROWS * dim * 2 + width * ROWS * ROWS * 2))
    return _call(
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
    tiles = plan.tiles.shape[0]
    pairs = tiles * (longest + 1) // 2
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
        by_key = _by_two_keys if dim <= 128 else _by_key
        k_part, v_part, ds = by_key(
            q, k, v, dout, lse, delta, plan, pairs, first_head, count, chain, scale
        )
        dq.append(_by_query(k, ds, plan, first_head, count, group, scale))
        for parts, part in ((dk, k_part), (dv, v_part)):
            parts.append(pair_sum(part.reshape(tiles, span, group // chain, ROWS, dim)))

    def to_rows(parts):
        x = jnp.concatenate(parts, axis=1)
        return x.at[plan.tile, :, plan.offset].get(mode="fill", fill_value=0)

    return jnp.concatenate(dq, axis=1)[: plan.tile.shape[0]], to_rows(dk), to_rows(dv)
