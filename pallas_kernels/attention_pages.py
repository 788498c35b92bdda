"""Pages of keys and values: how kernels read them, and how new tokens are written to them."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

SHARED_BYTES = 227 * 1024  # shared memory of one thread block on Hopper


def load_block(pages, table, seq, head, index, target, barrier, *, page: int) -> None:
    """Start copying KV block `index` of a sequence into shared memory [B, D].

    pages [N, page, Hkv, D] and table [S, M] are in device memory. The barrier gets B / min(page, B)
    arrivals.
    """
    size = target.shape[0]
    unit = min(page, size)
    for i in range(size // unit):
        position = index * size + i * unit
        entry = jnp.minimum(lax.div(position, page), table.shape[1] - 1)
        source = pages.at[table[seq, entry], pl.ds(lax.rem(position, page), unit), head]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(i * unit, unit)], barrier)


def drain(free, count: jax.Array) -> None:
    """Wait until all of `count` buffers of a ring are free; the nth was in slot n % ring."""
    ring = free.shape[0]
    lax.fori_loop(
        jnp.maximum(count - ring, 0),
        count,
        lambda n, _: plgpu.barrier_wait(free.at[lax.rem(n, ring)]),
        None,
    )


def clear_stale(values, first: jax.Array, end: jax.Array) -> None:
    """Zero the rows of a block of values [B, D] in shared memory whose position is not below `end`.

    A page's unused part may hold anything, and 0 * NaN is NaN. `first`: position of row 0.
    """
    rows, dim = values.shape
    for row in range(0, rows, 64):
        for column in range(0, dim, 64):
            part = values.at[pl.ds(row, 64), pl.ds(column, 64)]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            index = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(index + (first + row) < end, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def store_rows(columns, staging, out, row, head, low, high) -> None:
    """Write rows [low, high) of `columns`, arrays [ROWS, staging's width] side by side, to
    out[row + low : row + high, head].

    The number of rows of a copy is static, so the rows go in runs of 32, 16, 8, 4, 2 and 1.
    """
    width = staging.shape[1]
    for index, x in enumerate(columns):
        staging[...] = x
        plgpu.commit_smem()
        at = low
        for size in (32, 16, 8, 4, 2, 1):
            some = ((high - low) & size) != 0

            @pl.when(some)
            def _(at=at, size=size, index=index):
                target = out.at[pl.ds(row + at, size), head, pl.ds(index * width, width)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, size)], target)

            at = at + jnp.where(some, size, 0)
        plgpu.wait_smem_to_gmem(0)


def clear_rows(out, rows, count, staging, first, stride) -> None:
    """Zero out[r] for r in rows[first : count : stride]; by one warpgroup, through `staging`."""
    most, width = staging.shape
    heads, dim = out.shape[1:]
    staging[...] = plgpu.layout_cast(jnp.zeros(staging.shape, out.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()

    def clear(n, _):
        row = rows[first + n * stride]
        for head in range(0, heads, most):
            some = min(most, heads - head)
            for column in range(0, dim, width):
                target = out.at[row, pl.ds(head, some), pl.ds(column, width)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, some)], target)

    lax.fori_loop(0, lax.div(jnp.maximum(count - first, 0) + stride - 1, stride), clear, None)
    plgpu.wait_smem_to_gmem(0)


def _write_kernel(
    k, v, k_pages, v_pages, table, seq, row, first, length, staging, ready, *, most: int
):
    """Rows of k and v of one piece and KV head, in runs of a power of two, via shared memory."""
    piece, head = lax.axis_index("piece"), lax.axis_index("head")
    page = k_pages.shape[1]
    count, source, position = length[piece], row[piece], first[piece]
    target_page = table[seq[piece], lax.div(position, page)]
    offset = lax.rem(position, page)
    sizes = [1 << bit for bit in range(most.bit_length() - 1, -1, -1)]

    def runs(copy):
        at = 0
        for size in sizes:
            some = (count & size) != 0
            copy(at, size, some)
            at = at + jnp.where(some, size, 0)

    @pl.when(count > 0)
    def _():
        for which, values in enumerate((k, v)):

            def load(at, size, some, which=which, values=values):
                lax.cond(
                    some,
                    lambda: plgpu.copy_gmem_to_smem(
                        values.at[pl.ds(source + at, size), head],
                        staging.at[which, pl.ds(at, size)],
                        ready,
                    ),
                    lambda: plgpu.barrier_arrive(ready),
                )

            runs(load)
        plgpu.barrier_wait(ready)
        for which, pages in enumerate((k_pages, v_pages)):

            def store(at, size, some, which=which, pages=pages):
                pl.when(some)(
                    lambda: plgpu.copy_smem_to_gmem(
                        staging.at[which, pl.ds(at, size)],
                        pages.at[target_page, pl.ds(offset + at, size), head],
                    )
                )

            runs(store)
        plgpu.wait_smem_to_gmem(0)


def write_pages(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    piece_seq: jax.Array,
    piece_row: jax.Array,
    piece_first: jax.Array,
    piece_len: jax.Array,
    *,
    piece_rows: int,
) -> tuple[jax.Array, jax.Array]:
    """Copy the keys and values of new tokens into their pages, in place; no other byte of a page
    changes.

    Args:
      k, v: bfloat16 [T, Hkv, D]; T at least piece_rows.
      k_pages, v_pages: bfloat16 [N, page, Hkv, D]. page_table: int32 [S, M].
      piece_seq, piece_row, piece_first, piece_len: int32 [P]; a run of new tokens within one page:
        its sequence, first row of k and v, first position, length (0: nothing).
      piece_rows: static; the most rows of a piece, at most `page`.
    Returns:
      k_pages and v_pages.
    """
    if piece_rows > k_pages.shape[1] or piece_rows > k.shape[0]:
        raise ValueError(
            f"pieces of {piece_rows} rows do not fit pages {k_pages.shape} or tokens {k.shape}"
        )
    most = 1 << (piece_rows.bit_length() - 1)
    copies = 2 * most.bit_length()
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    plgpu.kernel(
        functools.partial(_write_kernel, most=most),
        out_type=(),
        grid=(piece_seq.shape[0], k.shape[1]),
        grid_names=("piece", "head"),
        scratch_types=[
            plgpu.SMEM((2, piece_rows, k.shape[2]), k.dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="attention_write_pages",
    )(k, v, k_ref, v_ref, page_table, piece_seq, piece_row, piece_first, piece_len)
    return jax.freeze(k_ref), jax.freeze(v_ref)
