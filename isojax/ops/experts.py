"""Experts of a mixture: tokens travel to their experts, and what comes back combines in routing
order.

Row: out[t] depends on x[t], its experts and weights alone; no token is ever dropped.
Tree: each expert's linear maps by `tree_dot`; a token's results combine by halving over its routing
slots.
Rounding: operands in the compute dtype; gate and up stay float32 until their product is rounded; an
expert's result is rounded, its weighted sum over slots is float32 and rounded once.
Gradient: an expert's weights sum over its tokens: within a leaf of rows in token order, in blocks
of `dot_width` tokens; leaves by `pair_sum`. Experts lie on all ranks of all mesh axes, so their
gradients are complete where they are.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import MODEL, ROWS, Layout
from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import halving, pair_sum, tree_dot, tree_sum
from isojax.ops import weight
from isojax.ops.op import op
from isojax.ops.weight import Parameter


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


def _grouped_dot(x: jax.Array, w: jax.Array, group: jax.Array, policy: Policy) -> jax.Array:
    """x [n, B, K], w [E, K, N], group [n] -> float32 [n, B, N]: `tree_dot` with each block's own
    weight.
    """
    return tree_dot(x, w, policy.dot_width, pick=lambda step: step[group])


def _everywhere(x: jax.Array, layout: Layout) -> jax.Array:
    """Rows [T, ...] of the residual stream, of every rank that has its own, on all of them."""
    if layout.data * layout.stream_ranks == 1:
        return x
    return lax.all_gather(x, layout.stream_axes, tiled=True)


def _home(y: jax.Array, experts: jax.Array, per_rank: int, layout: Layout) -> jax.Array:
    """Routed results [all rows, k, H], right on the rank that has the expert -> own [T, k, H]."""
    if layout.devices == 1:
        return y
    owners = layout.data * layout.stream_ranks
    y = y.reshape(owners, -1, *y.shape[1:])
    if owners > 1:
        y = lax.all_to_all(y, layout.stream_axes, split_axis=0, concat_axis=0)
    if owners < layout.devices:
        y = jnp.moveaxis(lax.all_gather(y, MODEL), 0, 1)
    y = y.reshape(layout.devices, *y.shape[-3:])
    rows, slots = jnp.indices(experts.shape)
    return y[experts // per_rank, rows, slots]


def _first_expert(per_rank: int, layout: Layout) -> jax.Array | int:
    if layout.devices == 1:
        return 0
    return lax.axis_index((*ROWS, MODEL)) * per_rank


class _Routed(NamedTuple):
    """What both directions need of the local experts' work, for one way of grouping rows into
    blocks.
    """

    blocks: _Blocks
    expert: jax.Array
    x: jax.Array
    gate: jax.Array
    up: jax.Array
    hidden: jax.Array


def _up(policy: Policy, x, blocks: _Blocks, expert, top_k: int, gate, up) -> _Routed:
    """Gate, up and their product for every block; x is [tokens of all ranks, H]."""
    token = jnp.where(blocks.row < x.shape[0] * top_k, blocks.row // top_k, x.shape[0])
    tile = x.at[token].get(mode="fill", fill_value=0)
    g = _grouped_dot(tile, gate, expert, policy)
    u = _grouped_dot(tile, up, expert, policy)
    return _Routed(blocks, expert, tile, g, u, (elementary.silu(g) * u).astype(x.dtype))


def _scatter(tiles: jax.Array, blocks: _Blocks, rows: int) -> jax.Array:
    """Block rows [n, B, H] back to routed rows [rows, H], zero where no local expert was asked."""
    flat = tiles.reshape(-1, tiles.shape[-1])
    out = jnp.zeros((rows, tiles.shape[-1]), tiles.dtype)
    return out.at[blocks.row.reshape(-1)].set(flat, mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(static, x, weights, experts, gate, up, down):
    return _experts_forward(static, x, weights, experts, gate, up, down)[0]


def _experts_forward(static, x, weights, experts, gate, up, down):
    policy, layout = static
    w_gate, w_up, w_down = (weight.value(w) for w in (gate, up, down))
    per_rank, top_k = w_gate.shape[0], experts.shape[1]
    everyone = _everywhere(x, layout)
    local = _everywhere(experts, layout).reshape(-1) - _first_expert(per_rank, layout)
    blocks = _blocks(local, per_rank, policy.dot_width)
    routed = _up(policy, everyone, blocks, blocks.group, top_k, w_gate, w_up)
    y = _grouped_dot(routed.hidden, w_down, blocks.group, policy).astype(x.dtype)
    y = _scatter(y, blocks, local.shape[0]).reshape(-1, top_k, x.shape[1])
    y = _home(y, experts, per_rank, layout)
    out = tree_sum(y.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)
    return out, (x, weights, experts, gate, up, down, y)


def _experts_backward(static, saved, dout):
    policy, layout = static
    x, weights, experts, gate, up, down, y = saved
    w_gate, w_up, w_down = (weight.value(w) for w in (gate, up, down))
    per_rank, top_k = w_gate.shape[0], experts.shape[1]
    d = dout.astype(jnp.float32)[:, None, :]
    dweights = tree_sum(d * y.astype(jnp.float32))
    dy = (d * weights[..., None]).astype(x.dtype)

    everyone, dy_all = _everywhere(x, layout), _everywhere(dy, layout)
    local = _everywhere(experts, layout).reshape(-1) - _first_expert(per_rank, layout)
    leaves, rows = policy.row_leaves, local.shape[0]
    leaf = jnp.arange(rows) // (rows // leaves)
    group = jnp.where((local >= 0) & (local < per_rank), local * leaves + leaf, -1)
    blocks = _blocks(group, per_rank * leaves, policy.dot_width)
    expert = blocks.group // leaves
    r = _up(policy, everyone, blocks, expert, top_k, w_gate, w_up)
    dy_all = dy_all.reshape(rows, -1)
    dy_tile = dy_all.at[blocks.row].get(mode="fill", fill_value=0)

    dhidden = _grouped_dot(dy_tile, jnp.swapaxes(w_down, 1, 2), expert, policy)
    s = elementary.sigmoid(r.gate)
    dgate = (dhidden * r.up * (s * (1.0 + r.gate * (1.0 - s)))).astype(x.dtype)
    dup = (dhidden * (r.gate * s)).astype(x.dtype)
    dx_tile = _grouped_dot(dgate, jnp.swapaxes(w_gate, 1, 2), expert, policy)
    dx_tile = dx_tile + _grouped_dot(dup, jnp.swapaxes(w_up, 1, 2), expert, policy)
    dx = _scatter(dx_tile.astype(x.dtype), blocks, rows).reshape(-1, top_k, x.shape[1])
    dx = _home(dx, experts, per_rank, layout)
    dx = tree_sum(dx, axis=1).astype(x.dtype)

    gradient = partial(_weight_gradient, blocks.group, per_rank, leaves, policy)
    return (
        dx,
        dweights,
        None,
        weight.cotangent(gate, gradient(r.x, dgate)),
        weight.cotangent(up, gradient(r.x, dup)),
        weight.cotangent(down, gradient(r.hidden, dy_tile)),
    )


def _weight_gradient(group, per_rank: int, leaves: int, policy: Policy, x, dy) -> jax.Array:
    """x [n, B, K], dy [n, B, N] of blocks -> float32 [E, K, N].

    A block's rows are added by halving; blocks join their (expert, leaf) group in order.
    """

    def add_block(total, block):
        at, a, b = block
        products = a.astype(jnp.float32)[:, :, None] * b.astype(jnp.float32)[:, None, :]
        return total.at[at].add(halving(products)), None

    zero = jnp.zeros((per_rank * leaves, x.shape[-1], dy.shape[-1]), jnp.float32)
    total, _ = lax.scan(add_block, zero, (group, x, dy))
    return pair_sum(total.reshape(per_rank, leaves, *total.shape[1:]), axis=1)


_experts.defvjp(_experts_forward, _experts_backward)


@op("experts", static=("policy", "layout"))
def experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: Parameter,
    up: Parameter,
    down: Parameter,
    *,
    policy: Policy,
    layout: Layout,
) -> jax.Array:
    """sum over slots of weights * down(silu(gate(x)) * up(x)) -> [T, H].

    x [T, H] of the residual stream; weights float32, chosen int32 [T, k] from the router; gate, up
    [E / devices, H, I] and down [E / devices, I, H], experts dealt to all ranks in order.
    """
    return _experts((policy, layout), x, weights, chosen, gate, up, down)
