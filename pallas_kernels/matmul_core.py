"""Parts shared by the matrix kernels: tiles in shared memory, the ring of stages, the leaf tree.

A kernel here is persistent and warp specialized. One producer warpgroup keeps a ring of shared
memory stages filled by bulk tensor copies (TMA); one or two consumer warpgroups run `wgmma` on the
stages and write their tile out while the producer already loads the next one. The ring never drains
between tiles: `step` counts the stages used since the kernel began, on both sides.

What fixes the bits of an output element is only the order of its products: inside a leaf K runs
upwards in one float32 accumulator that starts from zero, and leaves combine in a balanced binary
tree. Tile sizes, stages, the number of warpgroups and the place of a row in a tile move nothing.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP_ROWS = 64  # rows of one wgmma instruction
SWIZZLE_BYTES = 128
TILE_K = SWIZZLE_BYTES // 2  # bfloat16 elements along one swizzled line: one ring stage of K


def sm_count() -> int:
    """Streaming multiprocessors of the default GPU; an H100 or H200's 132 when there is none."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, rows: int = 8):
    """Shared memory in the layout that `wgmma` and TMA share: `rows` x 128-byte swizzled tiles."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (
        plgpu.TilingTransform((rows, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The barriers of the ring: `full[s]` says stage s is loaded, `empty[s]` that it is free."""

    stages: int
    full: jax.Array
    empty: jax.Array

    @staticmethod
    def barriers(stages: int, copies: int, consumers: int) -> dict[str, plgpu.Barrier]:
        """Barrier allocations; `copies` is the number of TMA copies that fill one stage."""
        return {
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        }

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))

    def produce(self, step: jax.Array, steps: int, issue: Callable) -> jax.Array:
        """Fill `steps` stages: `issue(k, slot, barrier)` starts the copies of the k-th of them."""

        def fill(k, step):
            slot = self.slot(step)

            @pl.when(step >= self.stages)
            def _wait_until_free():
                plgpu.barrier_wait(self.empty.at[slot])

            issue(k, slot, self.full.at[slot])
            return step + 1

        return lax.fori_loop(0, steps, fill, step)

    def drain(self, step: jax.Array) -> None:
        """Wait until the stages in flight are consumed: no barrier may be left half observed."""

        def wait(i, _):
            @pl.when(i >= 0)
            def _wait_until_free():
                plgpu.barrier_wait(self.empty.at[self.slot(i)])

        lax.fori_loop(step - self.stages, step, wait, None)

    def skip(self, step: jax.Array, steps: int) -> None:
        """Give `steps` stages back unread."""

        def body(i, _):
            slot = self.slot(step + i)
            plgpu.barrier_wait(self.full.at[slot])
            plgpu.barrier_arrive(self.empty.at[slot])

        lax.fori_loop(0, steps, body, None)

    def consume(
        self, step: jax.Array, steps: int, accumulators, multiply: Callable
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Accumulate `steps` stages from zero.

        Args:
          step: stages consumed so far.
          steps: stages of this accumulation, at least one.
          accumulators: shapes (rows, columns) of the float32 accumulators.
          multiply: `multiply(k, slot, *accumulator_refs)` issues the `wgmma` of the k-th stage.

        Returns:
          The accumulated values and the new step.
        """

        def scope(*refs):
            def issue(k, step):
                slot = self.slot(step)
                plgpu.barrier_wait(self.full.at[slot])
                multiply(k, slot, *refs)

            def body(k, step):
                issue(k, step)
                # All but the newest groups are done, so the stage before this one may be refilled.
                plgpu.wgmma_wait(len(refs))
                plgpu.barrier_arrive(self.empty.at[self.slot(step - 1)])
                return step + 1

            issue(jnp.int32(0), step)
            last = lax.fori_loop(1, steps, body, step + 1)
            values = tuple(ref[...] for ref in refs)
            plgpu.barrier_arrive(self.empty.at[self.slot(last - 1)])
            return (*values, last)

        *values, step = pl.run_scoped(scope, *(plgpu.ACC(shape) for shape in accumulators))
        return tuple(values), step


def leaf_tree(leaf: Callable[[], jax.Array], leaves: int, hold=None) -> jax.Array:
    """Sum `leaves` successive calls of `leaf()` in a balanced binary tree, as a counter carries.

    At most log2(leaves) partial sums wait at any time. Those of a whole half wait in `hold`, a
    shared memory reference private to the warpgroup, when it is given; the others in registers.
    """
    if leaves == 1:
        return leaf()
    left = leaf_tree(leaf, leaves // 2)
    if hold is None:
        return left + leaf_tree(leaf, leaves // 2)
    hold[...] = left
    right = leaf_tree(leaf, leaves // 2)
    return hold[...] + right


def check_leaves(contraction: int, leaves: int) -> None:
    """Raises ValueError unless `contraction` splits into a power of two of whole-stage leaves."""
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"the number of leaves must be a power of two, not {leaves}")
    if leaves > 1 and contraction % (leaves * TILE_K):
        raise ValueError(
            f"a contraction of {contraction} does not split into {leaves} leaves of a multiple of "
            f"{TILE_K}"
        )


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """`x` with zeros appended along `axis` up to a multiple of `multiple`."""
    extra = -x.shape[axis] % multiple
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths)


PRODUCER_REGISTERS = 40


def producer_registers(consumers: int) -> None:
    """Hand the producer's registers over; with one consumer everybody has the most already."""
    if consumers > 1:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")


def consumer_registers(consumers: int) -> None:
    if consumers > 1:
        plgpu.set_max_registers((512 - PRODUCER_REGISTERS) // consumers // 8 * 8, action="increase")


def launch(body, out_type, smem: dict, *, ctas: int, warpgroups: int, name: str):
    """A persistent kernel of `ctas` blocks: `warpgroups` consumers and, last, one producer.

    `body(*operands, *outputs, smem)` runs in every warpgroup, with axes "cta" and "wg"; `smem`
    holds the references allocated from the dictionary given here.
    """

    def entry(*refs):
        pl.run_scoped(lambda smem: body(*refs, smem), smem=smem, collective_axes="wg")

    return plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(),
    )


def _chunk(rows: int, cols: int, dtype, transposed: bool) -> tuple[int, int]:
    """The part of a warpgroup's tile that is written out at a time."""
    return (WARPGROUP_ROWS, cols if transposed else min(cols, SWIZZLE_BYTES // dtype.itemsize))


def store_buffer(
    warpgroups: int, rows: int, cols: int, dtype, transposed: bool, ragged: bool = False
):
    """Shared memory for `store_tile`: two chunks a warpgroup, or one if the tile is one chunk.

    With `ragged` its rows can be copied out one by one.
    """
    r, c = _chunk(rows, cols, jnp.dtype(dtype), transposed)
    slots = min(2, (rows // r) * (cols // c))
    shape = (warpgroups, slots, *((c, r) if transposed else (r, c)))
    return swizzled(shape, dtype, rows=1 if ragged else 8)


def store_tile(value, buffer, out_gmem, row, col, *, transposed: bool, valid=None) -> None:
    """Write a warpgroup's tile to out[row:, col:], or to out[col:, row:] transposed.

    Chunks go through shared memory to TMA, which drops what lies outside `out`. The copies still
    run on return: the next call, or the end of the kernel, waits for them. With `valid` only that
    many rows of `out` are written; the buffer must then be a ragged one.
    """
    rows, cols = value.shape
    r, c = _chunk(rows, cols, value.dtype, transposed)
    slots = buffer.shape[0]
    places = [(i, j) for i in range(0, rows, r) for j in range(0, cols, c)]
    for place, (i, j) in enumerate(places):
        slot = buffer.at[place % slots]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        chunk = value[i : i + r, j : j + c]
        if transposed:
            slot.T[...] = plgpu.layout_cast(chunk, plgpu.Layout.WGMMA_TRANSPOSED)
            out_row, out_col, before = col + j, row + i, j
        else:
            slot[...] = chunk
            out_row, out_col, before = row + i, col + j, i
        plgpu.commit_smem()
        _copy_rows(slot, out_gmem, out_row, out_col, None if valid is None else valid - before)


def _copy_rows(slot, out_gmem, row, col, count) -> None:
    """Copy the first `count` rows of `slot` (all of them if None) out, as one commit group."""
    rows, cols = slot.shape

    def copy(first, size):
        plgpu.copy_smem_to_gmem(
            slot.at[pl.ds(first, size)],
            out_gmem.at[pl.ds(row + first, size), pl.ds(col, cols)],
            commit_group=False,
        )

    if count is None:
        copy(0, rows)
    else:
        pl.when(count >= rows)(lambda: copy(0, rows))

        # A copy's height is static, so a part of the rows goes out in powers of two.
        @pl.when(jnp.logical_and(count > 0, count < rows))
        def _ladder():
            size = 1 << ((rows - 1).bit_length() - 1)
            while size:
                # The bits of `count` above this one say where the piece of `size` rows begins.
                first = count & ~(2 * size - 1)
                pl.when(count & size != 0)(functools.partial(copy, first, size))
                size //= 2

    plgpu.commit_smem_to_gmem_group()
