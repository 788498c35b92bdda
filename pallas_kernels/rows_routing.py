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
    """
    tokens, slots = chosen.shape
    rows = expert_rows_capacity(chosen.size, experts, block)
    here = (chosen >= 0) & (chosen < experts)
    key = jnp.where(here, chosen, experts).reshape(-1)
    order = jnp.argsort(key, stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[key].add(1)
    rank = jnp.arange(key.size, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[key[order]]
    sizes = (counts[:experts] + block - 1) // block * block
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    target = jnp.append(starts, rows)[key[order]] + rank
    target = jnp.where(key[order] < experts, target, rows).astype(jnp.int32)
    place = jnp.zeros(key.size, jnp.int32).at[order].set(target)
    token = jnp.full(rows, tokens, jnp.int32)
    token = token.at[target].set((order // slots).astype(jnp.int32), mode="drop")
    return ExpertRows(starts, sizes, place.reshape(tokens, slots), token)


def _slab(width: int) -> int:
    size = next((128 * v for v in (_VECTOR, 4, 2, 1) if width % (128 * v) == 0), None)
    if size is None:
        raise ValueError(f"a row of {width} elements is not a multiple of 128")
    return size


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
        grid=(tokens, y.shape[1] // slab),
        grid_names=("token", "slab"),
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
        grid=(tokens, slots),
        grid_names=("token", "slot"),
        kernel_name="slot_dots",
    )(y, place, dout)
