"""Row kernels for Hopper: elementwise arithmetic and reductions over the last axis.

A narrow row lies in one warp, a wide one in a warpgroup; a warpgroup takes a few rows at a time. A
reduction over a row adds the elements of a thread in order and the threads by shuffles: its order
depends on the op and the width, not on the row's place or on how many rows there are. Rows beyond
the last whole block are covered by moving the last block back: a row that is computed twice gets
the same bits twice.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES, WARPS = 32, 4
LOG2_E = 1.4426950408889634
# For kernels that read no element they write: threads need not wait for each other's stores.
NO_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def row_layout(width: int, warps: int = 1) -> plgpu.Layout:
    """Register layout of [rows, width]: `warps` warps a row, lanes side by side, 16 bytes at most.

    Raises:
      ValueError: if `width` is not a multiple of 32 (128 over a whole warpgroup).
    """
    span = LANES * warps
    vector = next((v for v in (8, 4, 2, 1) if width % (span * v) == 0), None)
    if vector is None:
        raise ValueError(f"a row of {width} elements is not a multiple of {span}")
    line = LANES * vector
    tiles = ((WARPS, line), (vector,)) if warps == 1 else ((1, WARPS * line), (line,), (vector,))
    return plgpu.Layout.TILED(fragmented_array.Tiling(tiles), (-3,), (-2,), -1)


def thread_vectors(width: int, most: int = 4) -> int:
    """Neighbouring elements a thread of a warpgroup takes of a row: a power of two up to `most`.

    Raises:
      ValueError: if `width` is not a multiple of 128.
    """
    span = LANES * WARPS
    vector = next((v for v in (8, 4, 2, 1) if v <= most and width % (span * v) == 0), None)
    if vector is None:
        raise ValueError(f"a row of {width} elements is not a multiple of {span}")
    return vector


def row_kernel(
    function: Callable,
    rows: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    outs: Sequence[tuple[int | None, jax.typing.DTypeLike]],
    name: str,
    *,
    elements: int = 64,
) -> list[jax.Array]:
    """Apply `function` to every row.

    Args:
      function: `function(*rows, *shared)` on values of a block: [block, width] a row array, [block]
        one of scalars, [width] a shared one; it returns as many values as there are outs.
      rows: arrays [R, W], or [R] for a scalar a row. All W are equal.
      shared: arrays [W], the same for every row.
      outs: width (None for a scalar a row) and dtype of the results.
      name: the kernel's name.
      elements: elements of a row array that a thread holds at a time; a row that is wider than a
        warp of such threads goes to a warpgroup.

    Returns:
      The results, [R, width] or [R].

    Raises:
      ValueError: if W is not a multiple of 32 (of 128 over a warpgroup).
    """
    count = rows[0].shape[0]
    width = next(x.shape[1] for x in rows if x.ndim == 2)
    warps = 1 if width <= LANES * elements else WARPS
    step = WARPS // warps
    layout = row_layout(width, warps)
    padded = max(count, step)
    rows = [jnp.pad(x, ((0, padded - count), *((0, 0),) * (x.ndim - 1))) for x in rows]
    block = step * max(1, elements * LANES * warps // width)
    block = min(block, padded // step * step)

    def body(*refs):
        row_refs, refs = refs[: len(rows)], refs[len(rows) :]
        shared_refs, out_refs = refs[: len(shared)], refs[len(shared) :]
        span = pl.ds(lax.min(lax.axis_index("block") * block, padded - block), block)

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        values = [
            load(ref.at[span], layout if x.ndim == 2 else layout.reduce(1))
            for ref, x in zip(row_refs, rows, strict=True)
        ]
        values += [load(ref, layout.reduce(0)) for ref in shared_refs]
        for ref, value in zip(out_refs, function(*values), strict=True):
            ref[span] = value.astype(ref.dtype)

    results = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((padded,) if w is None else (padded, w), dtype)
            for w, dtype in outs
        ],
        grid=(pl.cdiv(padded, block),),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=NO_BARRIERS,
    )(*rows, *shared)
    return [x if x.shape[0] == count else x[:count] for x in results]


def elementwise_kernel(
    function: Callable, operands: Sequence[jax.Array], dtypes: Sequence, name: str
) -> list[jax.Array]:
    """Apply an elementwise `function` to arrays of one shape, laid out as whatever rows fit.

    Args:
      function: takes the values of a block of every operand, returns as many as there are `dtypes`.
      operands: arrays of one shape, at least 32 elements and a multiple of 32.
      dtypes: dtypes of the results.
      name: the kernel's name.

    Returns:
      The results, of the operands' shape.
    """
    shape, size = operands[0].shape, operands[0].size
    widths = [w for w in (512, 256, 128, 64, 32) if size % w == 0]
    if not widths:
        raise ValueError(f"{shape} does not hold a multiple of 32 elements")
    width = next((w for w in widths if size // w >= WARPS), widths[-1])
    flat = [x.reshape(-1, width) for x in operands]
    elements = 16 if size >= 1 << 20 else 4
    outs = [(width, dtype) for dtype in dtypes]
    return [x.reshape(shape) for x in row_kernel(function, flat, (), outs, name, elements=elements)]


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """A scalar a row, [block], to [block, width]."""
    return lax.broadcast_in_dim(x, like.shape, (0,))


def along(x: jax.Array, like: jax.Array) -> jax.Array:
    """A shared row, [width], to [block, width]."""
    return lax.broadcast_in_dim(x, like.shape, (1,))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), the one way in which these kernels evaluate it.

    With half the instructions of an exponential and a quotient: exp(-x) as 2^(-x log2 e), 1 / y as
    rsqrt(y)^2, which is 0 for an infinite y. Relative error 7e-7 up to abs(x) = 8, 4e-6 up to 80.
    The result is a product: what is added to it, such as 1 - sigmoid, is fused with it everywhere.
    """
    root = lax.rsqrt(1.0 + jnp.exp2(x * -LOG2_E))
    return root * root


def to_f32(*values: jax.Array) -> tuple[jax.Array, ...]:
    """The values in float32."""
    return tuple(v.astype(jnp.float32) for v in values)
