"""Movement between ranks, and the sums of leaf trees that ranks share.

A collective here only moves numbers; every add is `pair_sum`. With one rank on an axis nothing is
moved and the expression is the same.
"""

import jax
from jax import lax

from isojax.mesh import DATA, MODEL, Layout
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, tree_sum


def leaf_count(size: int, leaves: int) -> int:
    """Leaves of a contraction over `size`: the largest power of two <= `leaves` that divides it."""
    while size % leaves:
        leaves //= 2
    return leaves


def local_leaves(size: int, leaves: int, ranks: int, what: str) -> int:
    """Leaves that one of `ranks` ranks owns of a contraction over `size` (the global length).

    Raises:
      ValueError: if ranks do not divide the leaves.
    """
    total = leaf_count(size, leaves)
    if total % ranks:
        raise ValueError(
            f"{what}: a contraction over {size} has {total} leaves, "
            f"which {ranks} ranks do not divide"
        )
    return total // ranks


def model_sum(partial: jax.Array, layout: Layout) -> jax.Array:
    """Finish a leaf tree whose subtrees lie on the "model" ranks: float32 [...] on every rank."""
    if layout.model == 1:
        return partial
    return pair_sum(lax.all_gather(partial, MODEL))


def data_sum(partial: jax.Array, layout: Layout) -> jax.Array:
    """Finish a leaf tree whose subtrees lie on the "data" ranks: float32 [...] on every rank."""
    if layout.data == 1:
        return partial
    return pair_sum(lax.all_gather(partial, DATA))


def head_sum(x: jax.Array, heads: int, policy: Policy, layout: Layout) -> jax.Array:
    """Sum x [local heads, ...] over all `heads` heads of the model ranks -> float32 [...].

    Heads form equal leaves, each summed by halving; leaves combine by `pair_sum`. Where ranks
    outnumber heads, neighbouring ranks hold the same head and one of each counts.
    """
    copies = max(1, layout.model // heads)
    ranks = layout.model // copies
    leaves = local_leaves(heads, policy.leaves, ranks, "sum over heads")
    share = pair_sum(tree_sum(x.reshape(leaves, x.shape[0] // leaves, *x.shape[1:]), axis=1))
    if layout.model == 1:
        return share
    return pair_sum(lax.all_gather(share, MODEL)[::copies])
