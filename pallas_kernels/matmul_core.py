"""Parts shared by the matrix kernels: tiles in shared memory, the ring of stages, the leaf tree.

A kernel here is persistent and warp specialized. One producer warpgroup keeps a ring of shared
memory stages filled by bulk tensor copies (TMA); one or two consumer warpgroups run `wgmma` on the
stages and write their tile out while the producer already loads the next one. The ring never drains
between tiles: `step` says on both sides how far it has turned.

What fixes the bits of an output element is only the order of its products: inside a leaf K runs
upwards in one float32 accumulator that starts from zero, and leaves combine in a balanced binary
tree. Tile sizes, stages, the number of warpgroups and the place of a row in a tile move nothing.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tuning import MatmulTile

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
    """The barriers of the ring: `full[s]` says stage s is loaded, `empty[s]` that it is free.

    Warpgroups that take tiles by turns have a set of `full` each: who waits on a barrier has to see
    every one of its phases.
    """

    tile: MatmulTile
    full: jax.Array
    empty: jax.Array
    first: jax.Array | int = 0  # of the barriers `full` in use

    @staticmethod
    def barriers(tile: MatmulTile, copies: int) -> dict[str, plgpu.Barrier]:
        """Barrier allocations; `copies` is the number of TMA copies that fill one stage."""
        sets = tile.warpgroups if tile.turns else 1
        return {
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=sets * tile.stages),
            "empty": plgpu.Barrier(num_arrivals=tile.readers, num_barriers=tile.stages),
        }

    @property
    def stages(self) -> int:
        return self.tile.stages

    def of_turn(self, index: jax.Array) -> "Ring":
        """The ring as the producer and the one consumer of the block's tile `index` see it."""
        if not self.tile.turns:
            return self
        first = lax.rem(index, jnp.int32(self.tile.warpgroups)) * self.stages
        return dataclasses.replace(self, first=first)

    def _slot(self, step: jax.Array) -> jax.Array:
        return jnp.where(step < self.stages, step, step - self.stages)

    def advance(self, step: jax.Array, steps: int | jax.Array) -> jax.Array:
        """The state after `steps` more stages."""
        total = step + steps
        return jnp.where(
            total < self.stages, total, self.stages + lax.rem(total, jnp.int32(self.stages))
        )

    def _next(self, step: jax.Array) -> jax.Array:
        return jnp.where(step == 2 * self.stages - 1, self.stages, step + 1)

    def _loaded(self, slot: jax.Array):
        return self.full.at[self.first + slot]

    def produce(self, step: jax.Array, steps: int | jax.Array, issue: Callable) -> jax.Array:
        """Fill `steps` stages: `issue(k, slot, barrier)` starts the copies of the k-th of them."""

        def fill(k, step):
            slot = self._slot(step)

            @pl.when(step >= self.stages)
            def _wait_until_free():
                plgpu.barrier_wait(self.empty.at[slot])

            issue(k, slot, self._loaded(slot))
            return self._next(step)

        return lax.fori_loop(0, steps, fill, step)

    def drain(self, step: jax.Array) -> None:
        """Wait until the stages in flight are consumed: no barrier may be left half observed."""

        def wait(slot, _):
            @pl.when(slot < step)
            def _wait_until_free():
                plgpu.barrier_wait(self.empty.at[slot])

        lax.fori_loop(0, self.stages, wait, None)

    def skip(self, step: jax.Array, steps: int) -> None:
        """Give `steps` stages back unread."""

        def body(_, step):
            slot = self._slot(step)
            plgpu.barrier_wait(self._loaded(slot))
            plgpu.barrier_arrive(self.empty.at[slot])
            return self._next(step)

        lax.fori_loop(0, steps, body, step)

    def consume(
        self, step: jax.Array, steps: int | jax.Array, accumulators, multiply: Callable
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Accumulate `steps` stages from zero.

        Args:
          step: the ring's state.
          steps: stages of this accumulation, at least one.
          accumulators: shapes (rows, columns) of the float32 accumulators.
          multiply: `multiply(k, slot, *accumulator_refs)` issues the `wgmma` of the k-th stage.

        Returns:
          The accumulated values and the new state.
        """

        def scope(*refs):
            def issue(k, slot):
                plgpu.barrier_wait(self._loaded(slot))
                multiply(k, slot, *refs)

            def body(k, carry):
                step, before = carry
                slot = self._slot(step)
                issue(k, slot)
                # All but the newest groups are done, so the stage before this one may be refilled.
                plgpu.wgmma_wait(len(refs))
                plgpu.barrier_arrive(self.empty.at[before])
                return self._next(step), slot

            first = self._slot(step)
            issue(jnp.int32(0), first)
            after, last = lax.fori_loop(1, steps, body, (self._next(step), first))
            values = tuple(ref[...] for ref in refs)
            plgpu.barrier_arrive(self.empty.at[last])
            return (*values, after)

        *values, step = pl.run_scoped(scope, *(plgpu.ACC(shape) for shape in accumulators))
        return tuple(values), step


def load_leaves(
    ring: Ring,
    step: jax.Array,
    first: int | jax.Array,
    last: int | jax.Array,
    phase_steps: Sequence[int],
    sides: Sequence,
) -> jax.Array:
    """Fill the ring with leaves first, ..., last - 1, each with its part of every contraction.

    Args:
      ring, step: the ring and its state.
      first, last: as above.
      phase_steps: stages of a leaf of each contraction.
      sides: of lhs and rhs (device memory of every contraction, the ring's stages, rows or columns
        to load, whether K is the first axis). Rows may be fewer than a stage has.

    Returns:
      The new state.
    """

    def issue(i, slot, barrier, leaf, phase):
        ks = pl.ds((leaf * phase_steps[phase] + i) * TILE_K, TILE_K)
        for gmem, stages, span, k_major in sides:
            src = gmem[phase].at[ks, span] if k_major else gmem[phase].at[span, ks]
            dst = stages.at[slot] if k_major else stages.at[slot, pl.ds(0, span.size)]
            plgpu.copy_gmem_to_smem(src, dst, barrier)

    def load(leaf, step):
        for phase, steps in enumerate(phase_steps):
            step = ring.produce(step, steps, functools.partial(issue, leaf=leaf, phase=phase))
        return step

    return lax.fori_loop(first, last, load, step)


def stage_product(smem: dict, rows, lhs_transposed: bool, rhs_transposed: bool) -> Callable:
    """What `Ring.consume` multiplies: `rows` of a stage of smem["lhs"] by smem["rhs"]."""

    def multiply(_, slot, acc):
        a, b = smem["lhs"].at[slot], smem["rhs"].at[slot]
        a = a.at[:, rows].T if lhs_transposed else a.at[rows, :]
        plgpu.wgmma(acc, a, b.T if rhs_transposed else b)

    return multiply


def leaf_tree(
    leaf: Callable[[], jax.Array],
    leaves: int,
    add: Callable[[jax.Array, jax.Array], jax.Array] = operator.add,
) -> jax.Array:
    """Sum `leaves` successive calls of `leaf()` in a balanced binary tree, as a counter carries.

    The sum of a left half waits while its right half is summed, at most one of every size. `add`
    adds two sums.
    """
    if leaves == 1:
        return leaf()
    left = leaf_tree(leaf, leaves // 2, add)
    return add(left, leaf_tree(leaf, leaves // 2, add))


def _add_now(left: jax.Array, right: jax.Array) -> jax.Array:
    """left + right. Put off by the compiler, it would keep both in registers meanwhile."""
    return lax.optimization_barrier(left + right)


REGISTERS = 192  # of a thread, for its accumulator and the sums that wait in registers


@dataclasses.dataclass(frozen=True)
class Holds:
    """Where the waiting sums of `leaf_tree` lie: in registers, the greatest in shared memory.

    A tile of 64 x 128 leaves registers for two waiting sums beside its accumulator, and shared
    memory for one more beside the ring. That one waits once a tile, where the finished tile is
    going to lie on its way out: by then nothing waits any more.
    """

    leaves: int
    tile: MatmulTile
    in_smem: bool

    @staticmethod
    def of(leaves: int, tile: MatmulTile) -> "Holds":
        """Raises ValueError if there is no room for the sums."""
        waiting = leaves.bit_length() - 1
        registers = tile.rows * tile.cols // 128
        beyond = waiting - max(0, REGISTERS // registers - 1)
        if beyond > 1:
            raise ValueError(
                f"the sums of {leaves} leaves do not fit in registers and shared memory: "
                f"{tile} needs fewer rows or columns"
            )
        return Holds(leaves, tile, in_smem=beyond == 1)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (self.tile.warpgroups, self.tile.rows, self.tile.cols)

    def smem(self, dtype: jax.typing.DTypeLike) -> dict:
        """Allocations of `open`, for outgoing tiles of `dtype`."""
        if not self.in_smem:
            return {"out": store_buffer(self.tile, dtype)}
        # As many slots as a waiting sum has room for: each warpgroup's share is its own.
        chunk = math.prod(_chunk(self.tile, dtype)) * jnp.dtype(dtype).itemsize
        slots = self.tile.rows * self.tile.cols * 4 // chunk
        buffer = store_buffer(dataclasses.replace(self.tile, slots=slots), dtype, exact=True)
        return {"hold_out": plgpu.RefUnion(swizzled(self._shape, jnp.float32), buffer)}

    def open(self, smem: dict) -> dict:
        """`smem` with "out", the buffer for outgoing tiles, and, if a sum waits there, "hold"."""
        if not self.in_smem:
            return smem
        hold, out = smem["hold_out"]
        return {**smem, "hold": hold, "out": out}

    def sum(self, leaf: Callable[[], jax.Array], smem: dict, wg: jax.Array) -> jax.Array:
        """`leaf_tree` of one warpgroup's tile, with `smem` opened."""
        half, index = self.leaves // 2, iter(range(self.leaves))

        def next_leaf():
            value = leaf()
            if self.in_smem and next(index) == half - 1:
                # The tile before this one must have left the place where a sum is going to wait.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return lax.optimization_barrier(value)

        if not self.in_smem:
            return leaf_tree(next_leaf, self.leaves, _add_now)
        hold = smem["hold"].at[wg]
        hold[...] = leaf_tree(next_leaf, half, _add_now)
        right = leaf_tree(next_leaf, half, _add_now)
        return _add_now(plgpu.load(hold, layout=plgpu.Layout.WGMMA, optimized=False), right)


def shared_bytes(tile: MatmulTile, leaves: int, out_dtype: jax.typing.DTypeLike) -> int:
    """Shared memory that a dense product's ring, waiting sums and outgoing tiles take."""
    stage = (tile.height + tile.cols) * TILE_K * 2
    if Holds.of(leaves, tile).in_smem:
        rest = tile.rows * tile.cols * 4
    else:
        rest = _slots(tile, out_dtype) * math.prod(_chunk(tile, out_dtype))
        rest *= jnp.dtype(out_dtype).itemsize
    return stage * tile.stages + rest * tile.warpgroups


def check_leaves(contraction: int, leaves: int) -> None:
    """Raises ValueError unless `contraction` splits into `leaves` equal parts, a power of two."""
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"the number of leaves must be a power of two, not {leaves}")
    if contraction % leaves:
        raise ValueError(f"a contraction of {contraction} does not split into {leaves} leaves")


def whole_leaves(x: jax.Array, axis: int, leaves: int) -> jax.Array:
    """`x` [rows, cols] with zeros behind every leaf of `axis`, up to whole ring stages.

    A copy, but only for leaves that are no multiple of a stage: narrow ones.
    """
    width = x.shape[axis] // leaves
    if leaves == 1 or width % TILE_K == 0:
        return x
    shape = (*x.shape[:axis], leaves, width, *x.shape[axis + 1 :])
    extra = [(0, -width % TILE_K if i == axis + 1 else 0) for i in range(3)]
    x = jnp.pad(x.reshape(shape), extra)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def whole_rows(rows: int) -> int:
    """`rows` up to a multiple of 8; fewer than 8 rows stay as they are."""
    return rows if rows < 8 else rows + -rows % 8


def whole_cols(cols: int) -> int:
    """`cols` up to what a swizzled array may have: a multiple of 8 in one line, or whole lines."""
    return cols + -cols % (8 if cols <= 32 else 64)


def whole_lines(x: jax.Array) -> jax.Array:
    """`x` [rows, cols] padded with zeros as TMA needs it: whole lines and whole groups of rows.

    What a tile reads outside the array TMA fills with zeros itself. Zero products change no sum.
    """
    rows, cols = x.shape
    extra = ((0, whole_rows(rows) - rows), (0, whole_cols(cols) - cols))
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def first_row(tile: MatmulTile, wg: jax.Array) -> jax.Array | int:
    """First row of consumer warpgroup `wg` in the block's tile."""
    return 0 if tile.turns else wg * tile.rows


def in_turn(tile: MatmulTile, wg: jax.Array, index: jax.Array, work: Callable[[], None]) -> None:
    """`work()`, unless another consumer warpgroup than `wg` has the block's tile `index`."""
    if tile.turns:
        pl.when(lax.rem(index, jnp.int32(tile.warpgroups)) == wg)(work)
    else:
        work()


REGISTER_FILE = 65536  # registers of a multiprocessor
PRODUCER_REGISTERS = 24  # of a thread


def producer_registers(consumers: int) -> None:
    """Hand registers to several consumers; with one, everybody has enough."""
    if consumers > 1:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")


def consumer_registers(consumers: int) -> None:
    """Take what the producer left: a block can only pass on what it began with."""
    if consumers > 1:
        warpgroups = consumers + 1
        at_launch = REGISTER_FILE // (128 * warpgroups) // 8 * 8 * warpgroups
        share = (at_launch - PRODUCER_REGISTERS) // consumers // 8 * 8
        plgpu.set_max_registers(share, action="increase")


def launch(
    body, out_type, smem: dict, *, ctas: int, warpgroups: int, name: str, fast_exp: bool = False
):
    """A persistent kernel of `ctas` blocks: `warpgroups` consumers and, last, one producer.

    `body(*operands, *outputs, smem=smem)` runs in every warpgroup, with axes "cta" and "wg"; `smem`
    holds the references allocated from the dictionary given here.
    """

    def entry(*refs):
        pl.run_scoped(lambda smem: body(*refs, smem=smem), smem=smem, collective_axes="wg")

    return plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=fast_exp),
    )


def _chunk(tile: MatmulTile, dtype: jax.typing.DTypeLike) -> tuple[int, int]:
    """The part of a warpgroup's tile that is written out at a time."""
    if tile.swap:
        return WARPGROUP_ROWS, tile.cols if tile.cols % WARPGROUP_ROWS else WARPGROUP_ROWS
    return WARPGROUP_ROWS, min(tile.cols, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)


def _slots(tile: MatmulTile, dtype: jax.typing.DTypeLike) -> int:
    r, c = _chunk(tile, dtype)
    return min(tile.slots, (tile.rows // r) * (tile.cols // c))


def store_buffer(
    tile: MatmulTile,
    dtype: jax.typing.DTypeLike,
    *,
    ragged: bool = False,
    exact: bool = False,
):
    """Shared memory for `store_tile`: `tile.slots` chunks a warpgroup.

    Args:
      tile: the tile.
      dtype: of the results.
      ragged: whether rows can be copied out one by one.
      exact: allocate `tile.slots` chunks even if the tile has fewer.
    """
    r, c = _chunk(tile, dtype)
    slots = tile.slots if exact else _slots(tile, dtype)
    shape = (tile.warpgroups, slots, *((c, r) if tile.swap else (r, c)))
    if ragged and tile.swap and jnp.dtype(dtype) == jnp.float32:
        return plgpu.SMEM(shape, dtype)  # no swizzled layout takes a transposed float32 store
    return swizzled(shape, dtype, rows=1 if ragged else 8)


def store_tile(
    accs, buffer, outs, row, col, *, dtype, transposed: bool, valid=None, epilogue=None
) -> None:
    """Write a warpgroup's tile to out[row:, col:], or to out[col:, row:] transposed.

    Args:
      accs: tuple of float32 tiles of one shape.
      buffer: what `store_buffer` allocated, for this warpgroup.
      outs: device memory references, one a result.
      row, col: place of the tile's first element, in the tile's own orientation.
      dtype: of all results.
      transposed: whether `outs` are transposed to the tile.
      valid: if given, only that many rows of the outs are written; the buffer must be a ragged one.
      epilogue: `epilogue(chunks, i, j)` makes the results of the chunk of the tiles that begins at
        their row i and column j; by default they are the tiles themselves.

    Chunks go through shared memory to TMA, which drops rows and parts of a chunk that lie outside
    an out. A chunk whose columns all do is not sent: in an out that is one chunk wide it would come
    to lie on the first. The copies still run on return: the next call, or the end of the kernel,
    waits for them.
    """
    rows, cols = accs[0].shape
    slots, *chunk = buffer.shape
    r, c = reversed(chunk) if transposed else chunk
    turn = 0
    for i in range(0, rows, r):
        for j in range(0, cols, c):
            values = tuple(acc[i : i + r, j : j + c] for acc in accs)
            if epilogue is not None:
                values = epilogue(values, i, j)
            for out, value in zip(outs, values, strict=True):
                slot = buffer.at[turn % slots]
                turn += 1
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                value = value.astype(dtype)
                if transposed:
                    slot.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                else:
                    slot[...] = value
                plgpu.commit_smem()
                place, before = ((col + j, row + i), j) if transposed else ((row + i, col + j), i)
                _copy_rows(slot, out, *place, None if valid is None else valid - before)


def _copy_rows(slot, out_gmem, row, col, count) -> None:
    """Copy the first `count` rows of `slot` (all of them if None) out, as one commit group."""
    rows, cols = slot.shape

    def copy(first, size):
        pl.when(col < out_gmem.shape[1])(functools.partial(send, first, size))

    def send(first, size):
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
