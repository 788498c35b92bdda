"""Which items of a work list a persistent thread block takes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MULTIPROCESSORS = 132  # shared memory holds one thread block of these kernels on each


def rounds(
    count: jax.Array, units: int
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """How many items this thread block (of the grid axis "sm") takes, and the entry of the list
    and unit of heads of its nth.

    count: entries of the list, most work first; each is `units` items. Rounds go to and fro: no
    block is to have the longest item of every round.
    """
    stride, work = lax.axis_size("sm"), count * units

    def place(visit):
        at = lax.axis_index("sm")
        return jnp.where(lax.rem(visit, 2) == 1, stride - 1 - at, at)

    def item(visit):
        index = visit * stride + place(visit)
        return lax.div(index, units), lax.rem(index, units)

    whole = lax.div(work, stride)
    return whole + (place(whole) < lax.rem(work, stride)).astype(jnp.int32), item
