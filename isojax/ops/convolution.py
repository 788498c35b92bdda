"""Causal depthwise convolution over a sequence, followed by silu.

Row: out[t] depends on its sequence's last `width` inputs, found in this call or in the cached
state.
Tree: the taps' products are added by halving (`tree_sum`).
Rounding: products and sums float32; the result is rounded once.
Gradient (training: whole sequences): by inputs, the taps mirrored, by halving (reference) or one
after another; by the weight, a sum over tokens in leaves of rows.
Kernels: a rank's channels of a group are a multiple of 128. Where inputs lie is worked out in
integers, for both evaluations; padding rows read nothing, and their result is 0.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.batch import RaggedBatch
from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import context_part, join_parts
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, token_leaves, tree_sum
from isojax.ops import weight
from isojax.ops.kernel import call
from isojax.ops.op import op
from isojax.ops.weight import Parameter
from pallas_kernels import rows_convolution as kernels
from pallas_kernels.rows_convolution import NOWHERE

Groups = tuple[jax.Array, ...]  # channels that have taps of their own, rows by channels


def _sources(batch: RaggedBatch, rows: int, width: int) -> jax.Array:
    """Where a row's last `width` inputs lie, oldest first: int32 [T, width].

    i >= 0 is row i of this call, NOWHERE is zero (before the sequence, or a row that is no token),
    and i < NOWHERE is row -2 - i of the state [slots * (width - 1), C].
    """
    row, sequences = jnp.arange(rows), batch.slot.shape[0]
    seq = jnp.minimum(batch.seq, sequences - 1)
    context, slot = batch.context[seq], batch.slot[seq]
    columns = []
    for back in range(width - 1, -1, -1):
        position = batch.positions - back
        cached = slot * (width - 1) + jnp.clip(position - context + width - 1, 0, width - 2)
        source = jnp.where(position >= context, row - back, -2 - cached)
        inside = (position >= 0) & (batch.seq < sequences)
        columns.append(jnp.where(inside, source, NOWHERE))
    return jnp.stack(columns, axis=1)


def _followers(batch: RaggedBatch, rows: int, width: int) -> jax.Array:
    """The row whose tap j reads row r, or NOWHERE: int32 [T, width]."""
    row, columns = jnp.arange(rows), []
    for ahead in range(width - 1, -1, -1):
        later = jnp.minimum(row + ahead, rows - 1)
        same = (batch.seq[later] == batch.seq) & (row + ahead < rows)
        columns.append(jnp.where(same & (batch.seq < batch.slot.shape[0]), later, NOWHERE))
    return jnp.stack(columns, axis=1)


def _rows_or_zero(x: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.where((row >= 0)[..., None], x[jnp.maximum(row, 0)], 0)


def _window(x: jax.Array, state: jax.Array, source: jax.Array) -> jax.Array:
    """The inputs at `source`: [T, width, C]."""
    cached = state[jnp.maximum(-2 - source, 0)]
    return jnp.where((source < NOWHERE)[..., None], cached, _rows_or_zero(x, source))


def _next_state(xs: Groups, state: jax.Array, batch: RaggedBatch, width: int) -> jax.Array:
    """The state after this call: each sequence's last `width - 1` inputs.

    Every slot looks for its sequence: gathers fuse into the one pass that writes the state, where
    a scatter of rows takes several times as long. Only integers are scattered.
    """
    slots, sequences = state.shape[0], batch.slot.shape[0]
    slot = jnp.where(batch.length > 0, batch.slot, slots)
    seq = jnp.full(slots, sequences).at[slot].set(jnp.arange(sequences), mode="drop")
    taken, seq = seq < sequences, jnp.minimum(seq, sequences - 1)
    start, context, length = (x[seq] for x in (batch.start, batch.context, batch.length))
    columns = []
    for back in range(width - 1, 0, -1):
        number = length - back  # of the input in this call; a negative one is cached
        row = jnp.clip(start + number, 0, xs[0].shape[0] - 1)
        new = jnp.concatenate([x[row] for x in xs], axis=1)
        cached = state[jnp.arange(slots), jnp.clip(number + width - 1, 0, width - 2)]
        value = jnp.where((number >= 0)[:, None], new, cached)
        columns.append(jnp.where((context + number >= 0)[:, None], value, 0))
    return jnp.where(taken[:, None, None], jnp.stack(columns, axis=1), state)


def _own_taps(ws: tuple[Parameter, ...], layout: Layout) -> Groups:
    """The taps of this rank's channels, [C_i, width]."""
    return tuple(context_part(weight.value(w), layout) for w in ws)


def _filter(window: jax.Array, taps: jax.Array) -> jax.Array:
    return tree_sum(window.astype(jnp.float32) * taps.T.astype(jnp.float32), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolution(policy, layout, xs, ws, state, batch):
    taps = _own_taps(ws, layout)
    rows, width = xs[0].shape[0], taps[0].shape[1]
    cached, source = state.reshape(-1, state.shape[-1]), _sources(batch, rows, width)
    evaluate = partial(call, kernels.convolution) if policy.evaluation == "mosaic" else _evaluate
    firsts = itertools.accumulate((x.shape[1] for x in xs[:-1]), initial=0)
    outs = tuple(
        evaluate(x, w, cached, source, jnp.int32(first))
        for x, w, first in zip(xs, taps, firsts, strict=True)
    )
    return outs, _next_state(xs, state, batch, width)


def _evaluate(x, taps, state, source, first):
    cached = lax.dynamic_slice_in_dim(state, first, x.shape[1], axis=1)
    return elementary.silu(_filter(_window(x, cached, source), taps)).astype(x.dtype)


def _step(xs, taps, state, layer, batch):
    """One new token a sequence: the state is read and moved on where it lies."""
    sequences, width = batch.slot.shape[0], taps[0].shape[1]
    seq = jnp.minimum(batch.seq, sequences - 1)
    known = jnp.where(batch.seq < sequences, jnp.minimum(batch.positions, width - 1), -1)
    held, slot = jax.new_ref(state), batch.slot[seq]
    outs = call(kernels.convolution_step, xs, jnp.concatenate(taps), held, layer, slot, known)
    return tuple(outs), jax.freeze(held)


def _convolution_forward(policy, layout, xs, ws, state, batch):
    return _convolution(policy, layout, xs, ws, state, batch), (xs, ws, batch)


def _gradients(x, taps, source, follower, dout, leaves):
    """(dx [T, C], each leaf's share of the taps' gradient, float32 [leaves, width, C])."""
    window = _rows_or_zero(x, source)
    before = _filter(window, taps)
    s = elementary.sigmoid(before)
    dout = _rows_or_zero(dout, source[:, -1])  # the newest tap reads the row itself
    d = dout.astype(jnp.float32) * (s * (1.0 + before * (1.0 - s)))
    dx = _filter(_rows_or_zero(d, follower), taps).astype(x.dtype)
    return dx, token_leaves(d[:, None, :] * window.astype(jnp.float32), leaves)


def _convolution_backward(policy, layout, saved, cotangents):
    xs, ws, batch = saved
    taps = _own_taps(ws, layout)
    shape = xs[0].shape[0], taps[0].shape[1]
    places = _sources(batch, *shape), _followers(batch, *shape)
    leaves = policy.row_leaves // layout.data
    if policy.evaluation == "mosaic":
        gradients = partial(call, kernels.convolution_backward)
    else:
        gradients = _gradients
    dxs, dws = [], []
    for x, w, own, dout in zip(xs, ws, taps, cotangents[0], strict=True):
        dx, shares = gradients(x, own, *places, dout, leaves=leaves)
        dxs.append(dx)
        dws.append(weight.cotangent(w, pair_sum(join_parts(shares, layout)).T))
    return tuple(dxs), tuple(dws), None, None


_convolution.defvjp(_convolution_forward, _convolution_backward)


@op("causal_convolution", static=("policy", "layout"))
def causal_convolution(
    xs: Groups,
    ws: tuple[Parameter, ...],
    state: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    *,
    policy: Policy,
    layout: Layout,
) -> tuple[Groups, jax.Array]:
    """silu(conv(x)) of groups of channels: xs [T, C_i], state [L, slots, width - 1, sum of C_i] ->
    (outs [T, C_i], state).

    ws: taps [C_i, width]; they have this model rank's channels, xs those of this context rank.
    layer: int32 scalar, the entry of `state` to read and write.

    Raises:
      ValueError: for channels that the kernels do not take.
    """
    if policy.evaluation == "mosaic" and batch.piece_rows == 1:
        return _step(xs, _own_taps(ws, layout), state, layer, batch)
    outs, new = _convolution(policy, layout, xs, ws, state[layer], batch)
    return outs, state.at[layer].set(new)
