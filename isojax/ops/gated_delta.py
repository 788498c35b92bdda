"""Gated delta rule (Gated DeltaNet's recurrence), in a form where decode and training share every bit.

Per value head the recurrence over tokens is (Yang et al., "Gated Delta Networks", 2024; as in Qwen3-Next)

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t

with unit k, unit q times K^-1/2, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). It is evaluated
by chunks of C absolute positions. With S the state at the chunk's start and G the sum of g from there on,

    L_ij = beta_i exp(G_i - G_j) k_i.k_j     T_i = e_i - sum_{j<i} L_ij T_j      (T = (I + L)^-1, row by row)
    r_i  = beta_i (v_i - exp(G_i) S^T k_i)   d_i = sum_{j<=i} T_ij r_j
    o_i  = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i.k_j) d_j
    S'   = exp(G_C) S + sum_j k_j (exp(G_C - G_j) d_j)^T                         (once every C tokens)

Row i reads rows up to i only. A prompt's chunks are evaluated many rows at once, decode evaluates one row and
keeps the open chunk's k, T, r, d and G beside S: the same operations on the same operands.

Rounded to the compute dtype: q, k after normalisation, o. Rounded to `policy.delta`: T (before later rows read
it), r, d, the scores exp(G_i - G_j) q_i.k_j, exp(G_C - G_j) d_j, and the copy of S that products read. Everything
else, S and G among it, is float32.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from isojax.mesh import DATA, MODEL
from isojax.numerics.policy import Policy
from isojax.numerics.trees import token_sum, tree_dot, tree_sum
from isojax.ops.op import op


@partial(
    register_dataclass,
    data_fields=["state", "keys", "inverse", "residual", "update", "decay"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a sequence leaves for its later tokens; every leaf is [layers, slots, heads, ...].

    state [.., Hv, K, V] float32: S at the start of the open chunk.
    Rows of the open chunk, of which those before the next position mean something:
    keys [.., Hk, C, K] in the compute dtype, inverse [.., Hv, C, C] (T), residual (r) and update (d)
    [.., Hv, C, V] in the rounding dtype, decay [.., Hv, C] float32 (G).
    """

    state: jax.Array
    keys: jax.Array
    inverse: jax.Array
    residual: jax.Array
    update: jax.Array
    decay: jax.Array


def init_state(
    layers: int, slots: int, Hk: int, Hv: int, K: int, V: int, policy: Policy
) -> DeltaState:
    """Zero state of `layers` layers and `slots` slots for Hk key heads of K and Hv value heads of V."""
    lead, chunk = (layers, slots), policy.chunk
    return DeltaState(
        state=jnp.zeros((*lead, Hv, K, V), jnp.float32),
        keys=jnp.zeros((*lead, Hk, chunk, K), policy.dtype),
        inverse=jnp.zeros((*lead, Hv, chunk, chunk), policy.delta),
        residual=jnp.zeros((*lead, Hv, chunk, V), policy.delta),
        update=jnp.zeros((*lead, Hv, chunk, V), policy.delta),
        decay=jnp.zeros((*lead, Hv, chunk), jnp.float32),
    )


def state_specs(state: DeltaState) -> DeltaState:
    """PartitionSpecs of a state's global arrays: slots over "data", heads over "model"."""
    return jax.tree.map(lambda _: PartitionSpec(None, DATA, MODEL), state)


@op("gated_delta", static=("policy", "token_leaves"))
def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state: DeltaState,
    layer: jax.Array,
    batch: Any,
    *,
    policy: Policy,
    token_leaves: int | None = None,
) -> tuple[jax.Array, DeltaState]:
    """One layer's gated delta rule over a ragged batch.

    q, k [T, Hk, K], v [T, Hv, V], a, b [T, Hv] in the compute dtype; A_log, dt_bias [Hv] float32. Value head h
    reads key head h // (Hv / Hk). state: leaves [layers, slots, ...], entry `layer` (int32 scalar) is read and
    replaced. batch: a `RaggedBatch` of one rank; its piece_rows is the chunk length, or 1 when every sequence
    contributes one token. A sequence whose first new token is at position 0 starts from a zero state.

    Returns (out [T, Hv, V] in v's dtype, 0 at padding rows; state').

    Differentiable in q, k, v, a, b, A_log and dt_bias for whole sequences (context 0); the returned state carries
    no gradient. The gradients of A_log and dt_bias sum over `token_leaves` leaves of this rank's tokens
    (default: policy.batch_leaves).

    Raises:
      ValueError: if head counts do not divide, or piece_rows is neither 1 nor policy.chunk.
    """
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"{v.shape[1]} value heads do not share {k.shape[1]} key heads evenly")
    if batch.piece_rows not in (1, policy.chunk):
        raise ValueError(f"piece_rows is 1 or the chunk, {policy.chunk}; got {batch.piece_rows}")
    leaves = policy.batch_leaves if token_leaves is None else token_leaves
    return _gated_delta(policy, leaves, (q, k, v, a, b, A_log, dt_bias), state, layer, batch)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_delta(policy, leaves, inputs, state, layer, batch):
    return _forward(policy, inputs, state, layer, batch)


def _gated_delta_fwd(policy, leaves, inputs, state, layer, batch):
    return _forward(policy, inputs, state, layer, batch), (inputs, batch)


def _gated_delta_bwd(policy, leaves, saved, cotangents):
    inputs, batch = saved
    return _backward(policy, leaves, inputs, batch, cotangents[0]), None, None, None


_gated_delta.defvjp(_gated_delta_fwd, _gated_delta_bwd)


# ------------------------------------------------------------------------------- rows and chunks


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Where a batch's pieces lie: row r of piece p is token `token[p, r]` and row `offset[p] + r` of its chunk."""

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
        """Rows of whole chunks [P, H, C, ...]: new [P, H, R, ...] at their rows, the open chunk's rows
        [P, H, C, ...] before them, zeros after."""
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


# ------------------------------------------------------------------- reference: within the chunk


def _gates(a, b, A_log, dt_bias):
    """Log decay g and write strength beta, float32 [..., Hv]."""
    x = a.astype(jnp.float32) + dt_bias
    softplus = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return -jnp.exp(A_log) * softplus, jax.nn.sigmoid(b.astype(jnp.float32))


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


def _tiles(policy: Policy, inputs, opened: DeltaState, rows: _Rows) -> _Tiles:
    q, k, v, a, b, A_log, dt_bias = inputs
    heads = v.shape[1]
    q, k, v, a, b = (rows.take(x) for x in (q, k, v, a, b))
    g, beta = _gates(a, b, A_log[:, None], dt_bias[:, None])
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
    decay = jnp.where(upto, jnp.exp(gap), 0)
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


# ------------------------------------------------------------------- reference: across the state


def _read(policy: Policy, tile: _Tiles, state, open_residual, open_update, offset, length):
    """One piece's rows given its chunk's entry state [Hv, K, V] -> (out [Hv, R, V] float32, r, d of the
    chunk [Hv, C, V], S^T k [Hv, R, V])."""
    dot = partial(tree_dot, width=policy.dot_width)
    operand = state.astype(policy.delta)
    grown = jnp.exp(tile.G)
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
    scaled = (jnp.exp(last - tile.chunk_G)[..., None] * update).astype(policy.delta)
    grown = tree_dot(jnp.swapaxes(tile.chunk_k, -1, -2), scaled, policy.dot_width)
    return jnp.exp(last)[..., None] * state + grown


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


def _forward(policy: Policy, inputs, state: DeltaState, layer, batch):
    rows = _rows(batch, state.state.shape[1], policy.chunk)
    opened = jax.tree.map(lambda x: x[layer, rows.source], state)
    tiles = _tiles(policy, inputs, opened, rows)
    out, residual, update, _, after, _ = _advance(
        policy, opened, tiles, rows, batch.start.shape[0]
    )
    keys = tiles.chunk_k[:, :: inputs[2].shape[1] // inputs[1].shape[1]]
    new = DeltaState(after, keys, tiles.chunk_inverse, residual, update, tiles.chunk_G)
    state = jax.tree.map(
        lambda old, x: old.at[layer, rows.slot].set(x.astype(old.dtype), mode="drop"), state, new
    )
    v = inputs[2]
    return rows.put(out, v.shape[0]).astype(v.dtype), state


# ------------------------------------------------------------------------- reference: the gradient


def _backward(policy: Policy, leaves: int, inputs, batch, d_out):
    """Gradients of the inputs for whole sequences. Products' operands are rounded to `policy.delta`."""
    q, k, v, a, b, A_log, dt_bias = inputs
    tokens, heads, groups = v.shape[0], v.shape[1], v.shape[1] // k.shape[1]
    sequences = batch.start.shape[0]
    rows = _rows(batch, 0, policy.chunk)
    dot = partial(tree_dot, width=policy.dot_width)
    turn = lambda x: jnp.swapaxes(x, -1, -2)  # noqa: E731
    low = lambda x: x.astype(policy.delta)  # noqa: E731

    empty = init_state(1, 1, k.shape[1], heads, k.shape[2], v.shape[2], policy)
    opened = jax.tree.map(lambda x: jnp.zeros((rows.seq.size, *x.shape[2:]), x.dtype), empty)
    t = _tiles(policy, inputs, opened, rows)
    _, _, update, entry, _, seen = _advance(policy, opened, t, rows, sequences)
    operand = low(entry)
    d_o = rows.take(d_out)
    grown = jnp.exp(t.G)
    last = t.chunk_G[..., -1:]
    to_end = jnp.where(rows.closes[:, None, None], jnp.exp(last - t.chunk_G), 0)[..., None]
    whole = jnp.where(rows.closes[:, None, None], jnp.exp(last), 0)[..., None]

    # Serial, last piece first: the gradient of the state that enters each chunk.
    d_read = dot(turn(t.scores), d_o)
    d_query = dot(turn(t.q), low(grown * d_o))

    def step(states, x):
        seq, closes, d_read, d_query, to_end, whole, grown, k, beta, inverse = x
        d_after = jnp.where(closes, states[seq], 0)
        d_update = low(d_read + to_end * dot(k, low(d_after)))
        d_residual = low(dot(turn(inverse), d_update))
        d_entry = (
            whole * d_after + d_query - dot(turn(k), low((beta * grown) * d_residual))
        )
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
    folded = tree_sum(along(k32, d_k_fold)) + whole[..., 0, 0] * tree_sum(
        along(entry, d_after)
    )
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

    d_g, d_beta = rows.put(d_g, tokens), rows.put(d_beta, tokens)
    g, beta = _gates(a, b, A_log, dt_bias)
    d_x = d_g * (-jnp.exp(A_log)) * jax.nn.sigmoid(a.astype(jnp.float32) + dt_bias)
    d_b = d_beta * (beta * (1 - beta))
    return (
        rows.put(d_q, tokens).astype(q.dtype),
        rows.put(d_k, tokens).astype(k.dtype),
        rows.put(d_v, tokens).astype(v.dtype),
        d_x.astype(a.dtype),
        d_b.astype(b.dtype),
        token_sum(d_g * g, leaves).astype(A_log.dtype),
        token_sum(d_x, leaves).astype(dt_bias.dtype),
    )
