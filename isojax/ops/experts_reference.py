"""The experts' reference evaluation: blocks of rows of one expert each, products by `tree_dot`."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import halving, tree_dot, tree_sum


class _Blocks(NamedTuple):
    """Routed rows sorted into blocks of one group each. row [n, B]: routed row, out of range where
    empty;
    group [n]: the block's group."""

    row: jax.Array
    group: jax.Array


def _blocks(group: jax.Array, groups: int, size: int) -> _Blocks:
    """Sort rows by group, keeping their order, each group padded to whole blocks of `size` rows.

    group int32 [R]; rows of a group outside [0, groups) go nowhere. All integers: exact anywhere.
    """
    rows = group.shape[0]
    count = -(-rows // size) + groups
    valid = (group >= 0) & (group < groups)
    key = jnp.where(valid, group, groups)
    order = jnp.argsort(key, stable=True)
    totals = jnp.zeros(groups + 1, jnp.int32).at[key].add(1)
    first_row = jnp.cumsum(totals) - totals
    blocks_of = (totals[:groups] + size - 1) // size
    first_block = jnp.cumsum(blocks_of) - blocks_of
    sorted_key = key[order]
    rank = jnp.arange(rows, dtype=jnp.int32) - first_row[sorted_key]
    place = jnp.append(first_block, count)[sorted_key] * size + rank
    place = jnp.where(sorted_key < groups, place, count * size)
    index = jnp.full(count * size, rows, jnp.int32).at[place].set(order, mode="drop")
    last_block = jnp.cumsum(blocks_of)
    block_group = jnp.searchsorted(last_block, jnp.arange(count), side="right")
    return _Blocks(index.reshape(count, size), jnp.minimum(block_group, groups - 1))


def _place(blocks: _Blocks, slots: int) -> jax.Array:
    """Where among the blocks' rows each of `slots` routed rows lies; 0 if it is elsewhere."""
    index = jnp.arange(blocks.row.size, dtype=jnp.int32)
    return jnp.zeros(slots, jnp.int32).at[blocks.row.reshape(-1)].set(index, mode="drop")


def _grouped_dot(x: jax.Array, w: jax.Array, group: jax.Array, policy: Policy) -> jax.Array:
    """x [n, B, K], w [E, K, N], group [n] -> float32 [n, B, N]: `tree_dot` with each block's own
    weight.
    """
    return tree_dot(x, w, policy.dot_width, pick=lambda step: step[group])


class _Routed(NamedTuple):
    """Rows of every block: inputs, float32 gate and up, and their rounded product."""

    x: jax.Array
    gate: jax.Array
    up: jax.Array
    hidden: jax.Array


def _rows_of(x: jax.Array, blocks: _Blocks, top_k: int) -> jax.Array:
    """The token rows [n, B, ...] of blocks, of x [tokens of all ranks, ...]; zero where empty."""
    token = jnp.where(blocks.row < x.shape[0] * top_k, blocks.row // top_k, x.shape[0])
    return x.at[token].get(mode="fill", fill_value=0)


def _up(policy: Policy, x, blocks: _Blocks, top_k: int, gate, up) -> _Routed:
    """Gate, up and their product for every block; x is [tokens of all ranks, H]."""
    tile = _rows_of(x, blocks, top_k)
    g = _grouped_dot(tile, gate, blocks.group, policy)
    u = _grouped_dot(tile, up, blocks.group, policy)
    return _Routed(tile, g, u, (elementary.silu(g) * u).astype(x.dtype))


def forward(policy: Policy, keep: bool, x, local, gate, up, down):
    """x [tokens, H], local int32 [tokens, k] -> (results [R, H], row of every slot, what `backward`
    wants of this besides if it is to be kept, or None)."""
    del keep  # the gradient computes everything anew
    experts, top_k = gate.shape[0], local.shape[1]
    blocks = _blocks(local.reshape(-1), experts, policy.dot_width)
    hidden = _up(policy, x, blocks, top_k, gate, up).hidden
    y = _grouped_dot(hidden, down, blocks.group, policy).astype(x.dtype)
    return y.reshape(-1, x.shape[1]), _place(blocks, local.size), None


def backward(policy: Policy, kept: None, x, local, share, dout, gate, up, down):
    """kept of `forward`, share float32 [tokens, k], dout [tokens, H] -> (gradients by rows of x
    [R, H], row of every slot, float32 gradients by gate, up and down)."""
    del kept
    experts, top_k = gate.shape[0], local.shape[1]
    blocks = _blocks(local.reshape(-1), experts, policy.dot_width)
    r = _up(policy, x, blocks, top_k, gate, up)
    # a result's gradient is its token's, times its weight: neither travels k times
    d_tile = _rows_of(dout, blocks, top_k)
    share = share.reshape(-1).at[blocks.row].get(mode="fill", fill_value=0)
    dy_tile = (d_tile.astype(jnp.float32) * share[..., None]).astype(x.dtype)

    dhidden = _grouped_dot(dy_tile, jnp.swapaxes(down, 1, 2), blocks.group, policy)
    s = elementary.sigmoid(r.gate)
    dgate = (dhidden * r.up * (s * (1.0 + r.gate * (1.0 - s)))).astype(x.dtype)
    dup = (dhidden * (r.gate * s)).astype(x.dtype)
    dx = _grouped_dot(dgate, jnp.swapaxes(gate, 1, 2), blocks.group, policy)
    dx = dx + _grouped_dot(dup, jnp.swapaxes(up, 1, 2), blocks.group, policy)

    gradient = partial(_weight_gradient, blocks.group, experts)
    weights = gradient(r.x, dgate), gradient(r.x, dup), gradient(r.hidden, dy_tile)
    return dx.astype(x.dtype).reshape(-1, x.shape[1]), _place(blocks, local.size), weights


def combine(rows: jax.Array, take: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sum of rows[take] [T, k, H] over slots, weighted by [T, k] -> [T, H]."""
    terms = rows[take]
    if weights is not None:
        terms = terms.astype(jnp.float32) * weights[..., None]
    return tree_sum(terms, axis=1).astype(rows.dtype)


def slot_dots(rows: jax.Array, take: jax.Array, dout: jax.Array) -> jax.Array:
    """rows[take] . dout: the gradient of `combine` by weights, float32 [T, k]."""
    return tree_sum(dout.astype(jnp.float32)[:, None, :] * rows[take].astype(jnp.float32))


def _weight_gradient(group, experts: int, x, dy) -> jax.Array:
    """x [n, B, K], dy [n, B, N] of blocks -> float32 [E, K, N].

    A block's rows are added by halving; blocks join their expert in order.
    """

    def add_block(total, block):
        at, a, b = block
        products = a.astype(jnp.float32)[:, :, None] * b.astype(jnp.float32)[:, None, :]
        return total.at[at].add(halving(products)), None

    zero = jnp.zeros((experts, x.shape[-1], dy.shape[-1]), jnp.float32)
    total, _ = lax.scan(add_block, zero, (group, x, dy))
    return total
