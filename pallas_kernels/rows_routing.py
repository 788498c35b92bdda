"""Between tokens and experts: where routed rows lie, how results combine, how gradients go back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_VECTOR = 8


class ExpertRows(NamedTuple):
    """Where the routed rows of some experts lie: by expert, each in token order, in whole blocks.

    starts, sizes: [E] int32, first row and number of rows of every expert, with those of no token
      that fill its last block.
    place: [T, k] int32, row of every slot; `rows` if its expert is not among these.
    token: [rows] int32, token of every row; T where there is none.
    """

    starts: jax.Array
    sizes: jax.Array
    place: jax.Array
    token: jax.Array


def expert_rows_capacity(slots: int, experts: int, block: int) -> int:
    """Rows that always suffice for `slots` routed rows of `experts` experts."""
    return (slots + min(slots, experts) * (block - 1)) // block * block


def expert_rows(chosen: jax.Array, experts: int, block: int) -> ExpertRows:
    """Lay out routed rows; integers only, so exact anywhere.

    Args:
      chosen: [T, k] int32, the expert of every slot; outside [0, experts) it goes nowhere.
      experts: number of experts.
      block: rows of a block, a multiple of `grouped_matmul.ROW_ALIGNMENT`.

    Returns:
      ExpertRows.

    Raises:
      ValueError: if the slots times one more than the experts reach 2^31.
    """
    (tokens, slots), size = chosen.shape, chosen.size
    if (experts + 1) * size > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{size} routed rows for {experts} experts are too many for one call")
    rows = expert_rows_capacity(size, experts, block)
    here = (chosen >= 0) & (chosen < experts)
    # Expert and slot in one number: sorting numbers is a fraction of the work of sorting pairs.
    key = jnp.where(here, chosen, experts).reshape(-1) * size + jnp.arange(size, dtype=jnp.int32)
    ordered = jnp.sort(key)
    bounds = jnp.arange(experts + 1, dtype=jnp.int32) * size
    first = jnp.sum(ordered < bounds[:, None], axis=1, dtype=jnp.int32)
    sizes = (jnp.diff(first) + block - 1) // block * block
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    expert, slot = ordered // size, ordered % size
    target = jnp.append(starts - first[:-1], rows)[expert] + jnp.arange(size, dtype=jnp.int32)
    target = jnp.where(expert < experts, target, rows)
    place = jnp.zeros(size, jnp.int32).at[slot].set(target, unique_indices=True)
    token = jnp.full(rows, tokens, jnp.int32).at[target].set(slot // slots, mode="drop")
    return ExpertRows(starts, sizes, place.reshape(tokens, slots), token)


def _slab(width: int) -> int:
    size = next((128 * v for v in (_VECTOR, 4, 2, 1) if width % (128 * v) == 0), None)
    if size is None:
        raise ValueError(f"a row of {width} elements is not a multiple of 128")
    return size


_TAKEN = 4  # rows that a block takes: as many loads are on their way at a time


def take_rows(x: jax.Array, token: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Rows of tokens where their experts read them.

    Args:
      x: [T, H] bfloat16, H a multiple of 128.
      token: [R] int32, the token of every row, zero rows where it is T; R a multiple of 4.
      scale: [R] float32, by which a row is multiplied, in float32 and rounded once.

    Returns:
      [R, H] of x's dtype.

    Raises:
      ValueError: for other H or R.
    """
    slab = _slab(x.shape[1])
    if token.size % _TAKEN:
        raise ValueError(f"{token.size} rows are not a multiple of {_TAKEN}")

    def body(x_gmem, token_gmem, *refs):
        *scale_gmem, out = refs
        span = pl.ds(lax.axis_index("slab") * slab, slab)
        rows = [lax.axis_index("block") * _TAKEN + i for i in range(_TAKEN)]
        tokens = [token_gmem[row] for row in rows]
        values = [x_gmem[lax.min(token, x.shape[0] - 1), span] for token in tokens]
        for row, token, value in zip(rows, tokens, values, strict=True):
            if scale_gmem:
                value = (value.astype(jnp.float32) * scale_gmem[0][row]).astype(x.dtype)
            none = lax.broadcast(token, value.shape) == x.shape[0]
            out[row, span] = jnp.where(none, jnp.zeros_like(value), value)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((token.size, x.shape[1]), x.dtype),
        grid=(x.shape[1] // slab, token.size // _TAKEN),  # only the last axis may be long
        grid_names=("slab", "block"),
        kernel_name="take_rows",
    )(x, token, *(() if scale is None else (scale,)))


def combine_slots(y: jax.Array, place: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sum of a token's results over its routing slots, by halving, in float32; rounded once.

    Args:
      y: [R, H] bfloat16 or float32, rows where they came to lie; H a multiple of 128.
      place: [T, k] int32, row of y of every slot; k a power of two.
      weights: [T, k] float32; without it the results are added as they are.

    Returns:
      [T, H] bfloat16.

    Raises:
      ValueError: if H is not a multiple of 128 or k not a power of two.
    """
    tokens, slots = place.shape
    if slots & (slots - 1):
        raise ValueError(f"the number of slots must be a power of two, not {slots}")
    slab = _slab(y.shape[1])

    def body(y_gmem, place_gmem, *refs):
        *weights_gmem, out = refs
        token, span = lax.axis_index("token"), pl.ds(lax.axis_index("slab") * slab, slab)
        terms = [y_gmem[place_gmem[token, k], span].astype(jnp.float32) for k in range(slots)]
        if weights_gmem:
            terms = [term * weights_gmem[0][token, k] for k, term in enumerate(terms)]
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
        out[token, span] = terms[0].astype(jnp.bfloat16)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, y.shape[1]), jnp.bfloat16),
        grid=(y.shape[1] // slab, tokens),
        grid_names=("slab", "token"),
        kernel_name="combine_slots",
    )(y, place, *(() if weights is None else (weights,)))


def slot_dots(y: jax.Array, place: jax.Array, dout: jax.Array) -> jax.Array:
    """Gradient of `combine_slots` by its weights: a slot's row of y times its token's gradient.

    Args:
      y, place: as there.
      dout: [T, H] bfloat16.

    Returns:
      [T, k] float32.

    Raises:
      ValueError: if H is not a multiple of 128.
    """
    tokens, slots = place.shape
    _slab(y.shape[1])

    def body(y_gmem, place_gmem, dout_gmem, out):
        token, slot = lax.axis_index("token"), lax.axis_index("slot")
        row = y_gmem[place_gmem[token, slot]].astype(jnp.float32)
        out[token, slot] = jnp.sum(dout_gmem[token].astype(jnp.float32) * row)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, slots), jnp.float32),
        grid=(slots, tokens),
        grid_names=("slot", "token"),
        kernel_name="slot_dots",
    )(y, place, dout)
