"""Movement between ranks, and the sums of leaf trees that ranks share.

A collective here only moves numbers; every add is `pair_sum`. With one rank on an axis nothing is
moved and the expression is the same.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import CONTEXT, DATA, HEADS, MODEL, Layout
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


def row_leaves(policy: Policy, layout: Layout) -> int:
    """Leaves of a sum over the rows that meet one rank's weights."""
    return policy.row_leaves // layout.row_ranks


# --- sums that "model" ranks share ---


def model_sum(partial: jax.Array, layout: Layout, dtype: jnp.dtype) -> jax.Array:
    """Finish a leaf tree whose subtrees lie on the "model" ranks, and round: float32 [T, ...].

    Gives the rows of the residual stream that this rank keeps: all of them, or, with sequence
    parallelism, its own equal run. Each rank finishes a run of rows and hands them out rounded: a
    ring's all-reduce moves as much. Rows that do not divide are finished by all ranks alike.
    """
    if layout.model == 1:
        return partial.astype(dtype)
    if partial.shape[0] % layout.model:
        return pair_sum(lax.all_gather(partial, MODEL)).astype(dtype)
    runs = partial.reshape(layout.model, -1, *partial.shape[1:])
    runs = lax.all_to_all(runs, MODEL, split_axis=0, concat_axis=0)
    own = pair_sum(runs).astype(dtype)
    return own if layout.sequence_parallel else lax.all_gather(own, MODEL, tiled=True)


def stream_sum(partial: jax.Array, layout: Layout) -> jax.Array:
    """Finish a sum over the residual stream's rows, as far as "model" ranks cut them."""
    if layout.model == 1 or not layout.sequence_parallel:
        return partial
    return pair_sum(lax.all_gather(partial, MODEL))


def stream_leaves(policy: Policy, layout: Layout) -> int:
    """Leaves of a sum over the residual stream's rows on one rank; `stream_sum` joins the rest."""
    return policy.row_leaves // (layout.data * layout.stream_ranks)


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


def data_sum(partial: jax.Array, layout: Layout) -> jax.Array:
    """Finish a leaf tree whose subtrees lie on the "data" ranks: float32 [...] on every rank."""
    if layout.data == 1:
        return partial
    return pair_sum(lax.all_gather(partial, DATA))


# --- rows of the residual stream ---


def gather_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Rows [T / model, ...] of sequence parallelism -> [T, ...] on every model rank."""
    if layout.model == 1 or not layout.sequence_parallel:
        return x
    return lax.all_gather(x, MODEL, tiled=True)


# --- context parallelism: all rows of some heads, or some rows of all heads ---


def context_part(x: jax.Array, layout: Layout) -> jax.Array:
    """Of a data rank's rows, or of heads or channels (first axis), those of this context rank."""
    if layout.context == 1:
        return x
    size = x.shape[0] // layout.context
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CONTEXT) * size, size)


def all_context_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `context_part`, for rows."""
    return x if layout.context == 1 else lax.all_gather(x, CONTEXT, tiled=True)


def rows_to_heads(x: jax.Array, layout: Layout) -> jax.Array:
    """x [rows of this context rank, local heads, D] -> [all rows, a share of those heads, D].

    Heads are dealt in order. Where context ranks outnumber them, neighbouring ranks receive the
    same head, and its gradient, which they know alike, is taken from one of them.
    """
    if layout.context == 1:
        return x
    return _rows_to_heads(max(1, layout.context // x.shape[1]), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_to_heads(copies: int, x: jax.Array) -> jax.Array:
    x = jnp.repeat(x, copies, axis=1)
    return lax.all_to_all(x, CONTEXT, split_axis=1, concat_axis=0, tiled=True)


def _rows_to_heads_forward(copies: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _rows_to_heads(copies, x), None


def _rows_to_heads_backward(copies: int, _: None, dy: jax.Array) -> tuple[jax.Array]:
    dx = lax.all_to_all(dy, CONTEXT, split_axis=0, concat_axis=1, tiled=True)
    return (dx[:, ::copies],)


_rows_to_heads.defvjp(_rows_to_heads_forward, _rows_to_heads_backward)


def heads_to_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `rows_to_heads`, for heads that are not outnumbered."""
    if layout.context == 1:
        return x
    return lax.all_to_all(x, CONTEXT, split_axis=0, concat_axis=1, tiled=True)


def join_parts(leaves: jax.Array, layout: Layout) -> jax.Array:
    """Leaves of a gradient [leaves of all rows, ..., part] -> [own leaves, ..., all parts].

    The last axis holds what `context_part` chose. A context rank then owns leaves, as it does of
    every other weight's gradient.
    """
    if layout.context == 1:
        return leaves
    return lax.all_to_all(leaves, CONTEXT, split_axis=0, concat_axis=leaves.ndim - 1, tiled=True)


def share_group(share: jax.Array, heads: int, layout: Layout) -> jax.Array:
    """Finish a sum over a head's group of queries whose parts lie on neighbouring ranks.

    share: this rank's part; heads: key/value heads of all ranks together.
    """
    copies = max(1, layout.head_ranks // heads)
    if copies == 1:
        return share
    first = lax.axis_index(HEADS) // copies * copies
    return pair_sum(lax.dynamic_slice_in_dim(lax.all_gather(share, HEADS), first, copies))


# --- rows to whoever asked for them ---

AT_LEAST = 128  # rows that a round carries from rank to rank: fewer would be all waiting


def before(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sums of the entries before each."""
    return jnp.cumsum(x, axis=axis) - x


def send_rows(
    rows: jax.Array,
    order: jax.Array,
    send: jax.Array,
    receive: jax.Array,
    most: jax.Array,
    size: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """Rows for other ranks of `axes`, of rows [N, H] -> the `size` rows that came, by senders.

    order int32 [M]: which rows go, in order of the ranks that get them. send, receive int32
    [ranks]: how many go to and come from each rank. most: the largest count of any two ranks, the
    same on all. Behind the last row that came stands anything.

    Rounds of equal blocks, half as large again as if rows were spread evenly: one is usually
    enough, and where all rows fit into one nothing is asked of the device.
    """
    ranks = send.shape[0]
    block = min(size, max(AT_LEAST, -(-3 * size // (2 * ranks))))
    start, own = before(send), before(receive)
    place = jnp.arange(size)
    sender = jnp.searchsorted(own, place, side="right") - 1
    nth = place - own[sender]

    def round_of(number: jax.Array | int, came: jax.Array) -> jax.Array:
        first = number * block
        wanted = start[:, None] + first + jnp.arange(block)
        out = rows[order.at[wanted].get(mode="clip")]
        got = lax.all_to_all(out, axes, split_axis=0, concat_axis=0)
        now = (nth >= first) & (nth < first + block)
        return jnp.where(now[:, None], got[sender, jnp.clip(nth - first, 0, block - 1)], came)

    room = jnp.zeros((size, rows.shape[1]), rows.dtype)
    if block == size:
        return round_of(0, room)
    return lax.fori_loop(0, (most + block - 1) // block, round_of, room)
