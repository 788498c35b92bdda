"""The gated delta rule's reference evaluation: every tree written out in elementwise operations.

The form and its rounding points are in `gated_delta.py`. R is the number of rows of a piece (a
chunk or 1), C that of a chunk: new rows are evaluated against the rows of their whole chunk, of
which the state holds those before.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import tree_dot, tree_sum
from isojax.ops.gated_delta_state import DeltaState, init_state


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Where a batch's pieces lie: row r of piece p is token `token[p, r]` and row `offset[p] + r`
    of its chunk."""

    token: jax.Array  # [P, R], 0 where not valid
    valid: jax.Array  # [P, R]
    offset: jax.Array  # [P]
    length: jax.Array  # [P]
    seq: jax.Array  # [P], S for an unused piece
    slot: jax.Array  # [P], out of range unless the piece is its sequence's last
    source: jax.Array  # [P], the slot to read
    fresh: jax.Array  # [P], the piece starts its sequence
    closes: jax.Array  # [P], the piece completes its chunk
    chunk: int

    def take(self, x: jax.Array) -> jax.Array:
        """x [T, H, ...] -> [P, H, R, ...], zeros at rows that are not valid."""
        rows = x[self.token]
        keep = self.valid.reshape(self.valid.shape + (1,) * (rows.ndim - 2))
        return jnp.moveaxis(jnp.where(keep, rows, 0), 1, 2)

    def put(self, x: jax.Array, tokens: int) -> jax.Array:
        """x [P, H, R, ...] -> [T, H, ...], zeros at tokens of no piece."""
        x = jnp.moveaxis(x, 2, 1)
        out = jnp.zeros((tokens, *x.shape[2:]), x.dtype)
        return out.at[jnp.where(self.valid, self.token, tokens)].set(x, mode="drop")

    def place(self, new: jax.Array, open_rows: jax.Array) -> jax.Array:
        """Rows of whole chunks [P, H, C, ...]: new [P, H, R, ...] at their rows, the open chunk's
        rows [P, H, C, ...] before them, zeros after."""
        return jax.vmap(_place)(new, open_rows, self.offset, self.length)

    def before(self, inclusive: bool) -> jax.Array:
        """[P, 1, R, C]: chunk row c comes before row r (or is it)."""
        row = self.offset[:, None, None] + jnp.arange(self.token.shape[1])[:, None]
        column = jnp.arange(self.chunk)
        mask = (column <= row) if inclusive else (column < row)
        return (mask & self.valid[:, :, None])[:, None]


def _place(new: jax.Array, open_rows: jax.Array, offset: jax.Array, length: jax.Array) -> jax.Array:
    row = jnp.arange(open_rows.shape[1])
    shape = (row.size,) + (1,) * (open_rows.ndim - 2)
    moved = new[:, jnp.clip(row - offset, 0, new.shape[1] - 1)]
    old = jnp.where((row < offset).reshape(shape), open_rows, 0)
    return jnp.where(((row >= offset) & (row < offset + length)).reshape(shape), moved, old)


def _rows(batch: Any, slots: int, chunk: int) -> _Rows:
    r = jnp.arange(batch.piece_rows)
    used = batch.piece_len > 0
    valid = r < batch.piece_len[:, None]
    seq = jnp.where(used, batch.piece_seq, batch.start.shape[0])
    source = batch.slot[jnp.where(used, batch.piece_seq, 0)]
    end = batch.piece_first + batch.piece_len
    last = used & (end == (batch.context + batch.length)[jnp.where(used, batch.piece_seq, 0)])
    offset = jnp.where(used, batch.piece_first % chunk, 0)
    return _Rows(
        token=jnp.where(valid, batch.piece_row[:, None] + r, 0),
        valid=valid,
        offset=offset,
        length=batch.piece_len,
        seq=seq,
        slot=jnp.where(last, source, slots),
        source=source,
        fresh=batch.piece_first == 0,
        closes=used & (offset + batch.piece_len == chunk),
        chunk=chunk,
    )


def _unit(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """x / sqrt(|x|^2 + epsilon) along the last axis, and that factor, in float32."""
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(tree_sum(x * x) + epsilon)[..., None]
    return x * scale, scale


def _share(x: jax.Array, heads: int) -> jax.Array:
    """[P, Hk, ...] -> [P, Hv, ...]: value heads of a group read the same key head."""
    return jnp.repeat(x, heads // x.shape[1], axis=1)


@partial(
    register_dataclass,
    data_fields=[
        "q", "k", "v", "beta", "G", "chunk_k", "chunk_G", "decay", "kk", "scores", "inverse",
        "chunk_inverse",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class _Tiles:
    """What a piece's rows know of their chunk without its state. R new rows, C chunk rows."""

    q: jax.Array  # [P, Hv, R, K]
    k: jax.Array  # [P, Hv, R, K]
    v: jax.Array  # [P, Hv, R, V] float32
    beta: jax.Array  # [P, Hv, R, 1]
    G: jax.Array  # [P, Hv, R, 1]
    chunk_k: jax.Array  # [P, Hv, C, K]
    chunk_G: jax.Array  # [P, Hv, C]
    decay: jax.Array  # [P, Hv, R, C]: exp(G_i - G_j), 0 after row i
    kk: jax.Array  # [P, Hv, R, C]: decay k_i.k_j
    scores: jax.Array  # [P, Hv, R, C]
    inverse: jax.Array  # [P, Hv, R, C]: T
    chunk_inverse: jax.Array  # [P, Hv, C, C]


def _tiles(policy: Policy, inputs, gates, opened: DeltaState, rows: _Rows) -> _Tiles:
    q, k, v = inputs
    heads = v.shape[1]
    q, k, v, g, beta = (rows.take(x) for x in (q, k, v, *gates))
    q = (_unit(q, policy.l2_epsilon)[0] * q.shape[-1] ** -0.5).astype(policy.dtype)
    k = _unit(k, policy.l2_epsilon)[0].astype(policy.dtype)
    chunk_k = _share(rows.place(k, opened.keys), heads)
    q, k = _share(q, heads), _share(k, heads)

    # G: one addition a row in order, from the open chunk's last row on.
    before = jnp.take_along_axis(
        opened.decay, jnp.maximum(rows.offset - 1, 0)[:, None, None], axis=2
    )[..., 0]
    before = jnp.where(rows.offset[:, None] > 0, before, 0)
    add = lambda total, x: (total + x,) * 2  # noqa: E731
    G = jnp.moveaxis(lax.scan(add, before, jnp.moveaxis(g, 2, 0))[1], 0, 2)
    chunk_G = rows.place(G, opened.decay)

    upto, strict = rows.before(True), rows.before(False)
    gap = jnp.where(upto, G[..., :, None] - chunk_G[..., None, :], 0)
    decay = jnp.where(upto, elementary.exp(gap), 0)
    width = policy.dot_width
    transposed = jnp.swapaxes(chunk_k, -1, -2)
    scores = (tree_dot(q, transposed, width) * decay).astype(policy.delta)
    kk = jnp.where(strict, tree_dot(k, transposed, width) * decay, 0)
    lower = kk * beta[..., None]

    # T, one row after the other; rows of the open chunk are there already.
    column = jnp.arange(rows.chunk)

    def row(known, x):
        r, lower_row = x
        here = (rows.offset + r)[:, None, None, None]
        unit = (column == here).astype(jnp.float32)
        new = (unit - tree_dot(lower_row[..., None, :], known, width)).astype(policy.delta)
        return jnp.where(column[:, None] == here, new, known), new[..., 0, :]

    known = jnp.where((column < rows.offset[:, None])[:, None, :, None], opened.inverse, 0)
    steps = (jnp.arange(lower.shape[2]), jnp.moveaxis(lower, 2, 0))
    _, inverse = lax.scan(row, known, steps)
    inverse = jnp.where(rows.valid[:, None, :, None], jnp.moveaxis(inverse, 0, 2), 0)
    return _Tiles(
        q=q,
        k=k,
        v=v.astype(jnp.float32),
        beta=beta[..., None],
        G=G[..., None],
        chunk_k=chunk_k,
        chunk_G=chunk_G,
        decay=decay,
        kk=kk,
        scores=scores,
        inverse=inverse,
        chunk_inverse=rows.place(inverse, opened.inverse),
    )


def _read(policy: Policy, tile: _Tiles, state, open_residual, open_update, offset, length):
    """One piece's rows given its chunk's entry state [Hv, K, V] -> (out [Hv, R, V] float32, r, d of
    the chunk [Hv, C, V], S^T k [Hv, R, V])."""
    dot = partial(tree_dot, width=policy.dot_width)
    operand = state.astype(policy.delta)
    grown = elementary.exp(tile.G)
    seen = dot(tile.k, operand)
    r = (tile.beta * (tile.v - grown * seen)).astype(policy.delta)
    residual = _place(r, open_residual, offset, length)
    d = dot(tile.inverse, residual).astype(policy.delta)
    update = _place(d, open_update, offset, length)
    out = grown * dot(tile.q, operand) + dot(tile.scores, update)
    return out, residual, update, seen


def _fold(policy: Policy, tile: _Tiles, state, update):
    """S' of a complete chunk."""
    last = tile.chunk_G[:, -1:]
    scaled = (elementary.exp(last - tile.chunk_G)[..., None] * update).astype(policy.delta)
    grown = tree_dot(jnp.swapaxes(tile.chunk_k, -1, -2), scaled, policy.dot_width)
    return elementary.exp(last)[..., None] * state + grown


def _advance(policy: Policy, opened: DeltaState, tiles: _Tiles, rows: _Rows, sequences: int):
    """Walk the pieces -> (out [P, Hv, R, V], residual, update [P, Hv, C, V], entry and exit states
    [P, Hv, K, V], S^T k [P, Hv, R, V])."""

    def piece(state, tile, open_residual, open_update, offset, length, closes):
        out, residual, update, seen = _read(
            policy, tile, state, open_residual, open_update, offset, length
        )
        after = jnp.where(closes, _fold(policy, tile, state, update), state)
        return out, residual, update, state, after, seen

    entry = jnp.where(rows.fresh[:, None, None, None], 0, opened.state)
    pieces = (tiles, opened.residual, opened.update, rows.offset, rows.length, rows.closes)
    if rows.token.shape[1] == 1:  # every sequence has one piece
        return jax.vmap(piece)(entry, *pieces)

    def step(states, x):
        seq, fresh, offset, first, rest = x
        # Pieces after a sequence's first start a chunk, with the state that the piece before left.
        continues = (offset == 0) & ~fresh & first[1]
        state = jnp.where(continues, states[seq], first[0])
        result = piece(state, *rest)
        return states.at[seq].set(result[4], mode="drop"), result

    earlier = jnp.concatenate([jnp.zeros((1,), bool), rows.seq[1:] == rows.seq[:-1]])
    states = jnp.zeros((sequences + 1, *entry.shape[1:]), jnp.float32)
    xs = (rows.seq, rows.fresh, rows.offset, (entry, earlier), pieces)
    return lax.scan(step, states, xs)[1]


def forward(
    policy: Policy, inputs, gates, state: DeltaState, layer, batch
) -> tuple[jax.Array, DeltaState]:
    """inputs: q, k, v; gates: g, beta [T, Hv] -> (out [T, Hv, V], state'), see `gated_delta`."""
    rows = _rows(batch, state.state.shape[1], policy.chunk)
    opened = jax.tree.map(lambda x: x[layer, rows.source], state)
    tiles = _tiles(policy, inputs, gates, opened, rows)
    out, residual, update, _, after, _ = _advance(policy, opened, tiles, rows, batch.start.shape[0])
    keys = tiles.chunk_k[:, :: inputs[2].shape[1] // inputs[1].shape[1]]
    new = DeltaState(after, after, keys, tiles.chunk_inverse, residual, update, tiles.chunk_G)
    state = jax.tree.map(
        lambda old, x: old.at[layer, rows.slot].set(x.astype(old.dtype), mode="drop"), state, new
    )
    v = inputs[2]
    return rows.put(out, v.shape[0]).astype(v.dtype), state


def backward(policy: Policy, inputs, gates, batch, d_out) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g and beta by token, for whole sequences. Products' operands are
    rounded to `policy.delta`."""
    q, k, v = inputs
    tokens, heads, groups = v.shape[0], v.shape[1], v.shape[1] // k.shape[1]
    sequences = batch.start.shape[0]
    rows = _rows(batch, 0, policy.chunk)
    dot = partial(tree_dot, width=policy.dot_width)
    turn = lambda x: jnp.swapaxes(x, -1, -2)  # noqa: E731
    low = lambda x: x.astype(policy.delta)  # noqa: E731

    empty = init_state(1, 1, k.shape[1], heads, k.shape[2], v.shape[2], policy)
    opened = jax.tree.map(lambda x: jnp.zeros((rows.seq.size, *x.shape[2:]), x.dtype), empty)
    t = _tiles(policy, inputs, gates, opened, rows)
    _, _, update, entry, _, seen = _advance(policy, opened, t, rows, sequences)
    operand = low(entry)
    d_o = rows.take(d_out)
    grown = elementary.exp(t.G)
    last = t.chunk_G[..., -1:]
    to_end = jnp.where(rows.closes[:, None, None], elementary.exp(last - t.chunk_G), 0)[..., None]
    whole = jnp.where(rows.closes[:, None, None], elementary.exp(last), 0)[..., None]

    # Serial, last piece first: the gradient of the state that enters each chunk.
    d_read = dot(turn(t.scores), d_o)
    d_query = dot(turn(t.q), low(grown * d_o))

    def step(states, x):
        seq, closes, d_read, d_query, to_end, whole, grown, k, beta, inverse = x
        d_after = jnp.where(closes, states[seq], 0)
        d_update = low(d_read + to_end * dot(k, low(d_after)))
        d_residual = low(dot(turn(inverse), d_update))
        d_entry = whole * d_after + d_query - dot(turn(k), low((beta * grown) * d_residual))
        return states.at[seq].set(d_entry, mode="drop"), (d_after, d_residual)

    xs = (
        rows.seq, rows.closes, d_read, d_query, to_end, whole, grown, t.k, t.beta, t.inverse
    )  # fmt: skip
    zero = jnp.zeros((sequences + 1, *entry.shape[1:]), jnp.float32)
    _, (d_after, d_residual) = lax.scan(step, zero, xs, reverse=True)

    # Parallel over chunks.
    upto, strict = rows.before(True), rows.before(False)
    d_scores = jnp.where(upto, dot(d_o, turn(update)) * t.decay, 0)
    d_lower = jnp.where(strict, -dot(d_residual, turn(update)), 0)
    d_kk = low(d_lower * t.beta * t.decay)
    d_qk = low(d_scores)
    d_q = grown * dot(d_o, turn(operand)) + dot(d_qk, t.k)
    d_k_row = dot(d_kk, t.k) - (t.beta * grown) * dot(d_residual, turn(operand))
    d_k_fold = to_end * dot(update, turn(low(d_after)))
    d_k_column = (dot(turn(d_qk), t.q) + dot(turn(d_kk), t.k)) + d_k_fold

    k32, q32 = t.k.astype(jnp.float32), t.q.astype(jnp.float32)
    along = lambda x, y: tree_sum(x * y)  # noqa: E731
    d_G = along(q32, d_q) + along(k32, d_k_row) - along(k32, d_k_column)
    folded = tree_sum(along(k32, d_k_fold)) + whole[..., 0, 0] * tree_sum(along(entry, d_after))
    d_G = d_G.at[..., -1].add(folded)
    d_beta = along(d_residual.astype(jnp.float32), t.v - grown * seen) + along(d_lower, t.kk)
    add = lambda total, x: (total + x,) * 2  # noqa: E731
    flipped = jnp.moveaxis(d_G, 2, 0)[::-1]
    d_g = jnp.moveaxis(lax.scan(add, jnp.zeros_like(flipped[0]), flipped)[1][::-1], 0, 2)
    d_v = t.beta * d_residual.astype(jnp.float32)

    # Value heads of a group add their share of a key head in order.
    def joined(x):
        x = x.reshape(x.shape[0], -1, groups, *x.shape[2:])
        total = x[:, :, 0]
        for i in range(1, groups):
            total = total + x[:, :, i]
        return total

    def through_unit(x, d_unit):
        unit, scale = _unit(rows.take(x), policy.l2_epsilon)
        return scale * (d_unit - unit * along(unit, d_unit)[..., None])

    d_q = through_unit(q, joined(d_q) * q.shape[-1] ** -0.5)
    d_k = through_unit(k, joined(d_k_row + d_k_column))

    return tuple(rows.put(x, tokens) for x in (d_q, d_k, d_v, d_g, d_beta))
