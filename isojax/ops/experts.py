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
from isojax.numerics.collectives import send_rows
from isojax.numerics.policy import Policy
from isojax.numerics.trees import halving, pair_sum, tree_dot, tree_sum
from isojax.ops import weight
from isojax.ops.op import op
from isojax.ops.weight import Parameter

EVERY = (*ROWS, MODEL)


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


class _Way(NamedTuple):
    """The way of results from their experts' ranks to the tokens' own; all int32.

    place [R]: where a routed row of all ranks stands among those sent by this rank, in order; out
    of range if another rank has the expert. send, receive: how many rows go to and come from each
    rank. first: where rows from here begin at each rank. take [T, k]: which received row belongs to
    a slot of an own token.
    """

    place: jax.Array
    send: jax.Array
    receive: jax.Array
    first: jax.Array
    take: jax.Array


def _before(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sums of the entries before each."""
    return jnp.cumsum(x, axis=axis) - x


def _way(everyone: jax.Array, per_rank: int, layout: Layout) -> _Way:
    """everyone [rows of all ranks, k]: experts of all tokens, negative where there is none."""
    owner = (everyone // per_rank).reshape(layout.devices, -1)
    at = jnp.arange(layout.devices)
    asked = (owner[:, :, None] == at).astype(jnp.int32)  # [asking rank, slot, asked rank]
    me, counts = lax.axis_index(EVERY), asked.sum(axis=1)
    mine = (owner == me).reshape(-1)
    place = jnp.where(mine, jnp.cumsum(mine) - 1, mine.size)
    # a slot's row comes behind those of the ranks before, and of its rank's slots before
    own = _before(counts[me])[None] + _before(asked[me], axis=0)
    take = jnp.take_along_axis(own, jnp.maximum(owner[me], 0)[:, None], axis=1)
    first = _before(counts, axis=1)[:, me]
    return _Way(place, counts[:, me], counts[me], first, take.reshape(-1, everyone.shape[1]))


def _home(
    tiles: jax.Array, blocks: _Blocks, asked: jax.Array, per_rank: int, layout: Layout
) -> jax.Array:
    """Results [n, B, H] of the local experts' blocks -> own tokens' [T, k, H], by routing slot.

    asked [rows of all ranks, k]: experts of all tokens.
    """
    if layout.devices == 1:
        return _scatter(tiles, blocks.row, asked.size).reshape(*asked.shape, -1)
    way = _way(asked, per_rank, layout)
    tokens, top_k = way.take.shape
    place = way.place.at[blocks.row].get(mode="fill", fill_value=way.place.size)
    sent = _scatter(tiles, place, way.place.size)
    received = send_rows(sent, tokens * top_k, way.send, way.receive, way.first, EVERY)
    return received[way.take]


def _own_run(x: jax.Array, layout: Layout) -> jax.Array:
    """Of rows that all model ranks hold, the run whose results come home to this one."""
    if layout.sequence_parallel or layout.model == 1:
        return x
    size = x.shape[0] // layout.model
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * size, size)


def _all_runs(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `_own_run`."""
    if layout.sequence_parallel or layout.model == 1:
        return x
    return lax.all_gather(x, MODEL, tiled=True)


def _even(x: jax.Array, fill: int, layout: Layout) -> jax.Array:
    """Rows behind x, so that model ranks may share them evenly."""
    if layout.sequence_parallel or x.shape[0] % layout.model == 0:
        return x
    extra = -x.shape[0] % layout.model
    return jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def _first_expert(per_rank: int, layout: Layout) -> jax.Array | int:
    return 0 if layout.devices == 1 else lax.axis_index(EVERY) * per_rank


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


def _rows_of(x: jax.Array, blocks: _Blocks, top_k: int) -> jax.Array:
    """The token rows [n, B, ...] of blocks, of x [tokens of all ranks, ...]; zero where empty."""
    token = jnp.where(blocks.row < x.shape[0] * top_k, blocks.row // top_k, x.shape[0])
    return x.at[token].get(mode="fill", fill_value=0)


def _up(policy: Policy, x, blocks: _Blocks, expert, top_k: int, gate, up) -> _Routed:
    """Gate, up and their product for every block; x is [tokens of all ranks, H]."""
    tile = _rows_of(x, blocks, top_k)
    g = _grouped_dot(tile, gate, expert, policy)
    u = _grouped_dot(tile, up, expert, policy)
    return _Routed(blocks, expert, tile, g, u, (elementary.silu(g) * u).astype(x.dtype))


def _scatter(tiles: jax.Array, place: jax.Array, rows: int) -> jax.Array:
    """Block rows [n, B, H] to their places [n, B] among `rows` rows; zero where none is."""
    flat = tiles.reshape(-1, tiles.shape[-1])
    out = jnp.zeros((rows, tiles.shape[-1]), tiles.dtype)
    return out.at[place.reshape(-1)].set(flat, mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(static, x, weights, experts, gate, up, down):
    return _experts_forward(static, x, weights, experts, gate, up, down)[0]


def _experts_forward(static, x, weights, experts, gate, up, down):
    policy, layout = static
    w_gate, w_up, w_down = (weight.value(w) for w in (gate, up, down))
    per_rank, top_k = w_gate.shape[0], experts.shape[1]
    everyone = _everywhere(_even(x, 0, layout), layout)
    asked = _everywhere(_even(experts, -1, layout), layout)
    blocks = _blocks(_local(asked, per_rank, layout), per_rank, policy.dot_width)
    routed = _up(policy, everyone, blocks, blocks.group, top_k, w_gate, w_up)
    y = _grouped_dot(routed.hidden, w_down, blocks.group, policy).astype(x.dtype)
    y = _home(y, blocks, asked, per_rank, layout)
    own = _own_run(_even(weights, 0, layout), layout)
    out = tree_sum(y.astype(jnp.float32) * own[..., None], axis=1).astype(x.dtype)
    return _all_runs(out, layout)[: x.shape[0]], (x, weights, experts, gate, up, down, y)


def _experts_backward(static, saved, dout):
    policy, layout = static
    x, weights, experts, gate, up, down, y = saved
    w_gate, w_up, w_down = (weight.value(w) for w in (gate, up, down))
    per_rank, top_k = w_gate.shape[0], experts.shape[1]
    own = _own_run(dout, layout).astype(jnp.float32)
    dweights = tree_sum(own[:, None, :] * y.astype(jnp.float32))

    everyone, asked = _everywhere(x, layout), _everywhere(experts, layout)
    local = _local(asked, per_rank, layout)
    leaves, rows = policy.row_leaves, local.shape[0]
    leaf = jnp.arange(rows) // (rows // leaves)
    group = jnp.where((local >= 0) & (local < per_rank), local * leaves + leaf, -1)
    blocks = _blocks(group, per_rank * leaves, policy.dot_width)
    expert = blocks.group // leaves
    r = _up(policy, everyone, blocks, expert, top_k, w_gate, w_up)
    # a result's gradient is its token's, times its weight: neither travels k times
    d_tile = _rows_of(_everywhere(dout, layout), blocks, top_k)
    share = _everywhere(weights, layout).reshape(rows)
    share = share.at[blocks.row].get(mode="fill", fill_value=0)
    dy_tile = (d_tile.astype(jnp.float32) * share[..., None]).astype(x.dtype)

    dhidden = _grouped_dot(dy_tile, jnp.swapaxes(w_down, 1, 2), expert, policy)
    s = elementary.sigmoid(r.gate)
    dgate = (dhidden * r.up * (s * (1.0 + r.gate * (1.0 - s)))).astype(x.dtype)
    dup = (dhidden * (r.gate * s)).astype(x.dtype)
    dx_tile = _grouped_dot(dgate, jnp.swapaxes(w_gate, 1, 2), expert, policy)
    dx_tile = dx_tile + _grouped_dot(dup, jnp.swapaxes(w_up, 1, 2), expert, policy)
    dx = _home(dx_tile.astype(x.dtype), blocks, asked, per_rank, layout)
    dx = tree_sum(dx, axis=1).astype(x.dtype)

    gradient = partial(_weight_gradient, blocks.group, per_rank, leaves, policy)
    return (
        _all_runs(dx, layout),
        _all_runs(dweights, layout),
        None,
        weight.cotangent(gate, gradient(r.x, dgate)),
        weight.cotangent(up, gradient(r.x, dup)),
        weight.cotangent(down, gradient(r.hidden, dy_tile)),
    )


def _local(asked: jax.Array, per_rank: int, layout: Layout) -> jax.Array:
    """Experts [rows, k] of all ranks -> their numbers on this rank, flat; outside [0, per_rank) if
    another has them."""
    return asked.reshape(-1) - _first_expert(per_rank, layout)


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
