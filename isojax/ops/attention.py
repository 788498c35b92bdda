"""Ragged paged attention: causal softmax attention of new tokens over their sequence's pages.

Row: out[t, head] depends on q[t, head] and the keys and values of the own sequence up to t.
Tree: keys are walked in blocks of `kv_block` from the sequence's start. Per block: scores by
`tree_dot` over features, a running maximum, the old sums always rescaled, exp(score - maximum)
added by halving, its rounded copy times the values by `tree_dot`. Every `kv_segment` keys a fresh
state begins; states are merged in order. A block or segment beyond a row adds exact zeros, so it
does not matter how far other rows make the walk go.
Rounding: q, k, v and the probabilities (before they meet the values) are in the compute dtype;
scores, sums and the output before its one rounding are float32. Gradient (training: whole
sequences): by blocks, in fixed order; keys' and values' gradients accumulate per query head and
then sum over the group of heads by `pair_sum`.
Under "mosaic" blocks, segments and heads come in the same order; the maximum is rounded to an
exponent of two, sums within a block have the tensor core's order and a register tile's, and the
gradient of a score is rounded before the scale multiplies it.
Source: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao et al., arXiv 2205.14135.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from isojax.batch import RaggedBatch
from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import share_group
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, tree_dot, tree_sum
from isojax.ops import attention_mosaic as mosaic
from isojax.ops.op import op


class _State(NamedTuple):
    """Softmax of the keys seen so far: float32 maximum, sum of exp [..., 1], weighted values [...,
    D].
    """

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def _empty(shape: tuple[int, ...], width: int) -> _State:
    return _State(
        jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), jnp.zeros((*shape, width))
    )


def _shrink(old: jax.Array, new: jax.Array) -> jax.Array:
    """exp(old - new) for maxima old <= new; exactly 1 where both are -inf."""
    return jnp.where(old == new, 1.0, elementary.exp(old - new))


def _absorb(state: _State, scores: jax.Array, values: jax.Array, policy: Policy) -> _State:
    """One block: scores [..., R, B] (-inf where hidden), values [..., B, D]."""
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1, keepdims=True))
    old = _shrink(state.maximum, maximum)
    p = jnp.where(scores == -jnp.inf, 0.0, elementary.exp(scores - maximum))
    total = state.total * old + tree_sum(p)[..., None]
    added = tree_dot(p.astype(values.dtype), values, policy.dot_width)
    return _State(maximum, total, state.values * old + added)


def _merge(left: _State, right: _State) -> _State:
    """Two segments' states in order; an empty one changes nothing."""
    maximum = jnp.maximum(left.maximum, right.maximum)
    a = jnp.where(left.maximum == -jnp.inf, 0.0, _shrink(left.maximum, maximum))
    b = jnp.where(right.maximum == -jnp.inf, 0.0, _shrink(right.maximum, maximum))
    return _State(maximum, left.total * a + right.total * b, left.values * a + right.values * b)


def _choose(condition: jax.Array, a: _State, b: _State) -> _State:
    return _State(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _piece_rows(batch: RaggedBatch) -> tuple[jax.Array, jax.Array]:
    """Row in T and position of every piece row: int32 [P, R]; row = T where unused."""
    offset = jnp.arange(batch.piece_rows, dtype=jnp.int32)[None, :]
    used = offset < batch.piece_len[:, None]
    row = jnp.where(used, batch.piece_row[:, None] + offset, batch.tokens.shape[0])
    return row, batch.piece_first[:, None] + offset


def _to_pieces(x: jax.Array, row: jax.Array) -> jax.Array:
    """[T, heads, D] -> [P, heads, R, D], zero in unused rows."""
    return jnp.moveaxis(x.at[row].get(mode="fill", fill_value=0), 2, 1)


def _from_pieces(x: jax.Array, row: jax.Array, tokens: int) -> jax.Array:
    """[P, heads, R, D] -> [T, heads, D], zero in padding rows."""
    x = jnp.moveaxis(x, 1, 2)
    flat = x.reshape(-1, *x.shape[2:])
    return jnp.zeros((tokens, *x.shape[2:]), x.dtype).at[row.reshape(-1)].set(flat, mode="drop")


def _write(pool: jax.Array, x: jax.Array, layer: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Put x [T, Hkv, D] at its positions' places in pool [L, pages, page, Hkv, D]."""
    page = pool.shape[2]
    seq = jnp.minimum(batch.seq, batch.slot.shape[0] - 1)
    target = batch.page_table[seq, batch.positions // page]
    target = jnp.where(batch.seq < batch.slot.shape[0], target, pool.shape[1])
    return pool.at[layer, target, batch.positions % page].set(x.astype(pool.dtype), mode="drop")


def _scores(q: jax.Array, keys: jax.Array, scale: float, policy: Policy) -> jax.Array:
    """q [P, Hkv, group, R, D], keys [P, Hkv, 1, B, D] -> [P, Hkv, group, R, B]."""
    return tree_dot(q, jnp.swapaxes(keys, -1, -2), policy.dot_width) * scale


def _attend(policy, scale, q, keys, values, layer, batch):
    """(out [T, Hq, D], log-sum-exp [T, Hq])."""
    tokens, heads, width = q.shape
    page, kv_heads = keys.shape[2], keys.shape[3]
    if page % policy.kv_block:
        raise ValueError(f"a page of {page} tokens is not made of blocks of {policy.kv_block}")
    row, position = _piece_rows(batch)
    tiles = _to_pieces(q, row).reshape(row.shape[0], kv_heads, heads // kv_heads, -1, width)
    flat_keys = keys.reshape(-1, *keys.shape[2:])
    flat_values = values.reshape(-1, *values.shape[2:])
    known = batch.piece_first + batch.piece_len  # keys from here on are not this piece's business
    table = batch.page_table[batch.piece_seq] + layer * keys.shape[1]

    def block(pool, j):
        start = j * policy.kv_block
        tile = pool[table[:, start // page]]
        tile = lax.dynamic_slice_in_dim(tile, start % page, policy.kv_block, axis=1)
        return jnp.moveaxis(tile, 2, 1)[:, :, None], start + jnp.arange(policy.kv_block)

    def step(j, carry):
        merged, state = carry
        fresh = (j * policy.kv_block) % policy.kv_segment == 0
        merged = _choose(fresh, _merge(merged, state), merged)
        state = _choose(fresh, _empty(tiles.shape[:-1], width), state)
        key, at = block(flat_keys, j)
        value, _ = block(flat_values, j)
        value = jnp.where((at < known[:, None])[:, None, None, :, None], value, 0)
        seen = at[None, None, :] <= position[:, :, None]
        s = _scores(tiles, key, scale, policy)
        s = jnp.where(seen[:, None, None], s, -jnp.inf)
        return merged, _absorb(state, s, value, policy)

    empty = _empty(tiles.shape[:-1], width)
    steps = (jnp.max(known) + policy.kv_block - 1) // policy.kv_block
    result = _merge(*lax.fori_loop(0, steps, step, (empty, empty)))
    used = (row < tokens)[:, None, None, :, None]
    lse = jnp.where(used, result.maximum + elementary.log(result.total), 0.0)
    # a zero may carry the sign of an underflow, which a later empty block would wash off
    used &= result.values != 0.0
    out = jnp.where(used, result.values / result.total, 0.0).astype(q.dtype)
    shape = (row.shape[0], heads, row.shape[1], -1)
    out, lse = (_from_pieces(x.reshape(shape), row, tokens) for x in (out, lse))
    return out, lse[..., 0]


def _differentiate(policy, scale, q, k, v, out, lse, dout, batch):
    """dq [T, Hq, D], dk, dv [T, Hkv, D] of this rank's query heads, float32."""
    tokens, heads, width = q.shape
    local = k.shape[1]
    row, position = _piece_rows(batch)
    pieces = row.shape[0]
    grouped = lambda x: x.reshape(pieces, local, heads // local, *x.shape[2:])  # noqa: E731
    tile = lambda x: grouped(_to_pieces(x, row))  # noqa: E731
    delta = tree_sum(dout.astype(jnp.float32) * out.astype(jnp.float32))
    q_t, d_t, lse_t, delta_t = tile(q), tile(dout), tile(lse[..., None]), tile(delta[..., None])
    k_t, v_t = (_to_pieces(x, row)[:, :, None] for x in (k, v))
    used = row < tokens
    chunks = jnp.max(jnp.where(batch.piece_len > 0, batch.piece_first // batch.piece_rows + 1, 0))
    index = jnp.arange(pieces)

    def pair(queries, keys_at, ok):
        """Probabilities and score gradients of query pieces against key pieces, rounded."""
        take = lambda x: x[queries]  # noqa: E731
        kk, vv = k_t[keys_at], v_t[keys_at]
        seen = position[keys_at][:, None, :] <= position[queries][:, :, None]
        seen &= used[keys_at][:, None, :] & used[queries][:, :, None] & ok[:, None, None]
        seen = seen[:, None, None]
        s = _scores(take(q_t), kk, scale, policy)
        p = jnp.where(seen, elementary.exp(s - take(lse_t)), 0.0)
        dp = tree_dot(take(d_t), jnp.swapaxes(vv, -1, -2), policy.dot_width)
        ds = jnp.where(seen, p * (dp - take(delta_t)) * scale, 0.0)
        return p.astype(q.dtype), ds.astype(q.dtype)

    def same_sequence(other):
        inside = (other >= 0) & (other < pieces)
        other = jnp.clip(other, 0, pieces - 1)
        return other, inside & (batch.piece_seq[other] == batch.piece_seq)

    def by_query(step, dq):  # key pieces in ascending order
        at, ok = same_sequence(index - (chunks - 1 - step))
        _, ds = pair(index, at, ok)
        return dq + tree_dot(ds, k_t[at], policy.dot_width)

    def by_key(step, carry):  # query pieces in ascending order
        dk, dv = carry
        at, ok = same_sequence(index + step)
        p, ds = pair(at, index, ok)
        dk = dk + tree_dot(jnp.swapaxes(ds, -1, -2), q_t[at], policy.dot_width)
        dv = dv + tree_dot(jnp.swapaxes(p, -1, -2), d_t[at], policy.dot_width)
        return dk, dv

    zero = jnp.zeros(q_t.shape, jnp.float32)
    dq = lax.fori_loop(0, chunks, by_query, zero)
    dk, dv = lax.fori_loop(0, chunks, by_key, (zero, zero))
    dq = _from_pieces(dq.reshape(pieces, heads, -1, width), row, tokens)
    dk, dv = (_from_pieces(pair_sum(x, axis=2), row, tokens) for x in (dk, dv))
    return dq, dk, dv


@dataclasses.dataclass(frozen=True)
class _Static:
    """kv_heads: of all ranks; scale: factor of q . k; longest: most tokens of a whole sequence."""

    policy: Policy
    layout: Layout
    kv_heads: int
    scale: float
    longest: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, *arrays):
    out, _, keys, values = _evaluate(static, *arrays, lse=False)
    return out, keys, values


def _evaluate(static, q, k, v, keys, values, layer, batch, work, *, lse):
    """(out, log-sum-exp or None, keys, values)."""
    policy, scale = static.policy, static.scale
    if policy.evaluation == "mosaic":
        return mosaic.forward(policy, scale, q, k, v, keys, values, layer, batch, work, lse=lse)
    keys, values = _write(keys, k, layer, batch), _write(values, v, layer, batch)
    return *_attend(policy, scale, q, keys, values, layer, batch), keys, values


def _attention_forward(static, q, k, v, *rest):
    out, lse, keys, values = _evaluate(static, q, k, v, *rest, lse=True)
    return (out, keys, values), (q, k, v, out, lse, *rest[-2:])


def _attention_backward(static, saved, cotangents):
    q, k, v, out, lse, batch, work = saved
    policy, scale, rows = static.policy, static.scale, (q, k, v, out, lse, cotangents[0])
    if policy.evaluation == "mosaic":
        gradients = mosaic.backward(*rows, work.backward, scale=scale, max_length=static.longest)
    else:
        gradients = _differentiate(policy, scale, *rows, batch)
    dq, *shares = gradients
    dk, dv = (share_group(x, static.kv_heads, static.layout) for x in shares)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), *(None,) * 5


_attention.defvjp(_attention_forward, _attention_backward)


def attention_work(
    batch: RaggedBatch, pool: jax.Array | None, *, heads: int, policy: Policy, layout: Layout
) -> Any:
    """What `attention` makes of a batch's integers, for all layers of a step; () for the reference.

    pool: keys or values [L, pages, page, Hkv, D], of which only the shape matters; None for a
    model without attention. heads: query heads of all ranks together. A batch of whole sequences
    gets what its gradient needs too.

    Raises:
      ValueError: where policy.evaluation = "mosaic" cannot serve these shapes.
    """
    if pool is None or policy.evaluation == "reference":
        return ()
    return mosaic.plan(policy, heads // layout.head_ranks, pool.shape, batch)


@op("attention", static=("kv_heads", "policy", "layout"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    work: Any = (),
    *,
    kv_heads: int,
    policy: Policy,
    layout: Layout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write k and v into their pages, then attend: -> (out [T, Hq, D], keys, values).

    q [T, Hq, D], k, v [T, Hkv, D] of this rank, norm and rotary applied; keys, values [L, pages,
    page, Hkv, D]; layer: int32 scalar, the entry of the pools; work: of `attention_work`; kv_heads:
    key/value heads of all ranks together. Scores are scaled by D ** -0.5.

    Differentiable in q, k and v for whole sequences (context 0; under "mosaic" of a batch that says
    so); the pools carry no gradient.

    Raises:
      ValueError: for a gradient that the batch has no work lists for.
    """
    scale, longest = float(q.shape[-1]) ** -0.5, batch.page_table.shape[1] * keys.shape[2]
    static = _Static(policy, layout, kv_heads, scale, min(longest, q.shape[0]))
    return _attention(static, q, k, v, keys, values, layer, batch, work)
