"""How rows travel between tokens and their experts, which are dealt to all ranks in order.

Movement and integers only. Every rank sees all tokens; results go home to the tokens' own ranks, as
many rows as were asked of each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import MODEL, ROWS, Layout
from isojax.numerics.collectives import before, send_rows

EVERY = (*ROWS, MODEL)


def everywhere(x: jax.Array, layout: Layout) -> jax.Array:
    """Rows [T, ...] of the residual stream, of every rank that has its own, on all of them."""
    if layout.data * layout.stream_ranks == 1:
        return x
    return lax.all_gather(x, layout.stream_axes, tiled=True)


def _first_expert(per_rank: int, layout: Layout) -> jax.Array | int:
    return 0 if layout.devices == 1 else lax.axis_index(EVERY) * per_rank


def local(asked: jax.Array, per_rank: int, layout: Layout) -> jax.Array:
    """Experts [rows, k] of all ranks -> their numbers on this rank; outside [0, per_rank) if
    another has them."""
    return asked - _first_expert(per_rank, layout)


class _Way(NamedTuple):
    """The way of results from their experts' ranks to the tokens' own; all int32.

    place [R]: where a routed row of all ranks stands among those sent by this rank, in order; out
    of range if another rank has the expert. send, receive: how many rows go to and come from each
    rank, most: the largest of those counts anywhere. take [T, k]: which received row belongs to a
    slot of an own token.
    """

    place: jax.Array
    send: jax.Array
    receive: jax.Array
    most: jax.Array
    take: jax.Array


def _way(everyone: jax.Array, per_rank: int, layout: Layout) -> _Way:
    """everyone [rows of all ranks, k]: experts of all tokens, negative where there is none."""
    owner = (everyone // per_rank).reshape(layout.devices, -1)
    at = jnp.arange(layout.devices)
    asked = (owner[:, :, None] == at).astype(jnp.int32)  # [asking rank, slot, asked rank]
    me, counts = lax.axis_index(EVERY), asked.sum(axis=1)
    mine = (owner == me).reshape(-1)
    place = jnp.where(mine, jnp.cumsum(mine) - 1, mine.size)
    # a slot's row comes behind those of the ranks before, and of its rank's slots before
    own = before(counts[me])[None] + before(asked[me], axis=0)
    take = jnp.take_along_axis(own, jnp.maximum(owner[me], 0)[:, None], axis=1)
    take = take.reshape(-1, everyone.shape[1])
    return _Way(place, counts[:, me], counts[me], counts.max(), take)


def home(
    y: jax.Array, place: jax.Array, asked: jax.Array, per_rank: int, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Results y [R, H] of the local experts -> (rows, take [T, k]): rows[take] are the results of
    own tokens, by routing slot.

    place int32 [slots of all ranks]: row of y of a slot whose expert is here. asked [tokens of all
    ranks, k]: experts of all tokens.
    """
    if layout.devices == 1:
        return y, place.reshape(asked.shape)
    way = _way(asked, per_rank, layout)
    order = jnp.zeros(place.size, jnp.int32).at[way.place].set(place, mode="drop")
    came = send_rows(y, order, way.send, way.receive, way.most, way.take.size, EVERY)
    return came, way.take


def own_run(x: jax.Array, layout: Layout) -> jax.Array:
    """Of rows that all model ranks hold, the run whose results come home to this one."""
    if layout.sequence_parallel or layout.model == 1:
        return x
    size = x.shape[0] // layout.model
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * size, size)


def all_runs(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `own_run`."""
    if layout.sequence_parallel or layout.model == 1:
        return x
    return lax.all_gather(x, MODEL, tiled=True)


def even(x: jax.Array, fill: int, layout: Layout) -> jax.Array:
    """Rows behind x, so that model ranks may share them evenly."""
    if layout.sequence_parallel or x.shape[0] % layout.model == 0:
        return x
    extra = -x.shape[0] % layout.model
    return jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
