"""Tiles of rows that may start anywhere: held in shared memory in parts of 64 columns, and the
products of such tiles.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention_mma import interpreted, operand
from pallas_kernels.attention_pages import clear_stale
from pallas_kernels.attention_softmax import ROWS

COLUMNS = 64  # of a part: what one swizzled row of shared memory holds
Parts = tuple[jax.Array, ...]  # columns side by side


def parts(leading: int, rows: int, dim: int):
    """Shared memory for `leading` tiles [rows, dim] that start at any row of their arrays.

    A tile is held in parts of 64 columns, [leading, dim / 64, rows, 64]. The same bytes are named
    twice: a copy addresses plain rows, since it would address whole tiles of 8 rows of an array in
    device memory if the target were tiled; the tensor cores need it tiled. See `landing`, `tiled`.
    """
    shape = (leading, dim // COLUMNS, rows, COLUMNS)
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return plgpu.RefUnion(plgpu.SMEM(shape, jnp.bfloat16, transforms=(swizzle,)), operand(shape))


def landing(union):
    """The view of `parts` that a copy may fill."""
    return union[1] if interpreted() else union[0]  # which the interpreter knows not to be one


leaving = landing  # the view that a copy may empty


def tiled(union):
    """The view of `parts` that is read."""
    return union[1]


def load_parts(source, rows, head, union, index, barrier) -> None:
    """Start copying source[rows, head] to tile `index` of `parts`; dim / 64 arrivals."""
    target = landing(union)
    for part in range(target.shape[1]):
        columns = pl.ds(part * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(source.at[rows, head, columns], target.at[index, part], barrier)


def _rows_product(accumulator, a, b) -> None:
    """Issue accumulator += a @ b.T of tiles in parts."""
    for part in range(a.shape[0]):
        plgpu.wgmma(accumulator, a.at[part], b.at[part].transpose((1, 0)))


def _plain(ref) -> jax.Array:
    return jnp.concatenate([ref[part] for part in range(ref.shape[0])], axis=1)


def rows_product(a, b, *, then: Callable[[], None] = lambda: None) -> jax.Array:
    """a @ b.T of tiles in parts; `then` runs when the product is issued, before it is awaited."""
    if interpreted():
        then()
        return jnp.dot(_plain(a), _plain(b).T, preferred_element_type=jnp.float32)

    def issue(accumulator):
        _rows_product(accumulator, a, b)
        then()
        return accumulator[...]

    return pl.run_scoped(issue, plgpu.ACC((a.shape[1], b.shape[1]), jnp.float32))


def rows_products(one, other, then: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
    """then(a @ b.T) of one pair (a, b) while the other's product is under way, and that product."""
    if interpreted():
        return then(rows_product(*one)), rows_product(*other)

    def issue(first, second):
        _rows_product(first, *one)
        _rows_product(second, *other)
        result = then(plgpu.wgmma_accumulator_load(first, wait_n=other[0].shape[0]))
        return result, plgpu.wgmma_accumulator_load(second)

    accumulators = (plgpu.ACC((a.shape[1], b.shape[1]), jnp.float32) for a, b in (one, other))
    return pl.run_scoped(issue, *accumulators)


def accumulate_parts(sums: Parts, a, b) -> Parts:
    """sums + a @ b, of columns in parts."""
    if interpreted():
        a = a[...]
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        return tuple(x + dot(a, b[part]) for part, x in enumerate(sums))

    def issue(accumulators):
        for part, x in enumerate(accumulators):
            plgpu.wgmma(x, a, b.at[part])

    return pl.run_state(issue)(tuple(map(plgpu.ACC.init, sums)))


def accumulate_both(
    sums: tuple[Parts, Parts], a, b, then: Callable[[], jax.Array], d,
    after: Callable[[jax.Array], None],
) -> tuple[Parts, Parts]:  # fmt: skip
    """(sums[0] + a @ b, sums[1] + c @ d) with c = then(), which runs while the first is under way;
    after(c) does while both are.
    """
    if interpreted():
        first, c = accumulate_parts(sums[0], a, b), then()
        after(c)
        return first, accumulate_parts(sums[1], c, d)

    def issue(accumulators):
        for part, x in enumerate(accumulators[0]):
            plgpu.wgmma(x, a, b.at[part])
        c = then()
        for part, x in enumerate(accumulators[1]):
            plgpu.wgmma(x, c, d.at[part])
        after(c)

    return pl.run_state(issue)(tuple(tuple(map(plgpu.ACC.init, x)) for x in sums))


def zeros(dim: int) -> Parts:
    """An empty accumulator [ROWS, dim]."""
    zero = lambda: jnp.zeros((ROWS, COLUMNS), jnp.float32)  # noqa: E731
    return tuple(plgpu.layout_cast(zero(), plgpu.Layout.WGMMA) for _ in range(dim // COLUMNS))


def store(target, sums: Parts) -> None:
    """Write columns in parts to target [ROWS, D] in device memory."""
    for part, x in enumerate(sums):
        target[:, part * COLUMNS : (part + 1) * COLUMNS] = x


def clear(values, first: jax.Array, end: jax.Array) -> None:
    """`clear_stale` of a tile in parts."""
    for part in range(values.shape[0]):
        clear_stale(values.at[part], first, end)
