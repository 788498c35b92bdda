"""Gradients of one call, on every rank of the mesh at once (inside `shard_map`).

Ops deliver weight gradients summed over this data rank's batch leaves, the same on every model rank
that holds the weight. Here they are finished over "data" and join those of earlier microbatches, in
order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.ops import weight
from isojax.ops.op import op
from isojax.trainer.loss import rank_total, token_total
from isojax.trainer.sharding import Placement, reduce_gradient

# parameters -> loss [T], (stats [T, K], what else is known of the rows)
RowLosses = Callable[[Any], tuple[jax.Array, tuple[jax.Array, Any]]]


@op("accumulate")
def accumulate(total: jax.Array, term: jax.Array) -> jax.Array:
    """total + term, float32: microbatches join in order."""
    return total + term


def add_gradients(
    row_losses: RowLosses,
    params: Any,
    totals: tuple[Any, jax.Array],
    *,
    placements: Any,
    policy: Policy,
    layout: Layout,
) -> tuple[tuple[Any, jax.Array], Any]:
    """Add one call's gradient and sums to those of the calls before it.

    totals: gradients (float32 blocks of each `placement.state`) and sums float32 [1 + K]: the loss
    and the columns of stats. Returns both, updated, and what else `row_losses` said of the rows.
    """
    gradients, sums = totals
    losses, backward, (stats, rows) = jax.vjp(
        lambda places: row_losses(weight.attach(params, places)),
        weight.places(params),
        has_aux=True,
    )
    (partials,) = backward(jnp.ones_like(losses))

    def finish(placement: Placement, total: jax.Array, partial: jax.Array) -> jax.Array:
        return accumulate(total, reduce_gradient(partial, placement=placement, layout=layout))

    gradients = jax.tree.map(finish, placements, gradients, partials)
    terms = jnp.concatenate([losses[:, None], stats], axis=1)
    terms = rank_total(token_total(terms, policy=policy, layout=layout), layout=layout)
    return (gradients, accumulate(sums, terms)), rows
