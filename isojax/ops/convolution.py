"""Causal depthwise convolution over a sequence, followed by silu.

Row: out[t] depends on its sequence's last `width` inputs, found in this call or in the cached
state.
Tree: the taps' products are added by halving (`tree_sum`).
Rounding: products and sums float32; the result is rounded once.
Gradient (training: whole sequences): by inputs, the taps mirrored with the same halving; by the
weight, a sum over tokens in leaves of rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from isojax.batch import RaggedBatch
from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import context_part, join_parts
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, token_leaves, tree_sum
from isojax.ops import weight
from isojax.ops.op import op
from isojax.ops.weight import Parameter


def _window(x: jax.Array, state: jax.Array, batch: RaggedBatch, width: int) -> jax.Array:
    """The last `width` inputs of every row, oldest first: [T, width, C]; zero before the sequence.

    state [slots, width - 1, C] holds the inputs before this call, newest last.
    """
    rows, sequences = jnp.arange(x.shape[0]), batch.slot.shape[0]
    seq = jnp.minimum(batch.seq, sequences - 1)
    context, slot = batch.context[seq], batch.slot[seq]
    columns = []
    for back in range(width - 1, -1, -1):
        position = batch.positions - back
        here = x[jnp.maximum(rows - back, 0)]
        cached = state[slot, jnp.clip(position - context + width - 1, 0, width - 2)]
        value = jnp.where((position >= context)[:, None], here, cached)
        columns.append(jnp.where((position >= 0)[:, None], value, 0))
    return jnp.stack(columns, axis=1)


def _next_state(x: jax.Array, state: jax.Array, batch: RaggedBatch, width: int) -> jax.Array:
    """The state after this call: each sequence's last `width - 1` inputs."""
    last = batch.context + batch.length
    columns = []
    for back in range(width - 1, 0, -1):
        position = last - back
        row = jnp.clip(batch.start + position - batch.context, 0, x.shape[0] - 1)
        cached = state[batch.slot, jnp.clip(position - batch.context + width - 1, 0, width - 2)]
        value = jnp.where((position >= batch.context)[:, None], x[row], cached)
        columns.append(jnp.where((position >= 0)[:, None], value, 0))
    slot = jnp.where(batch.length > 0, batch.slot, state.shape[0])
    return state.at[slot].set(jnp.stack(columns, axis=1), mode="drop")


def _own_taps(ws: tuple[Parameter, ...], layout: Layout) -> jax.Array:
    """The taps of this rank's channels, float32 [width, C]."""
    parts = [context_part(weight.value(w), layout) for w in ws]
    return jnp.concatenate(parts).T.astype(jnp.float32)


def _filter(window: jax.Array, taps: jax.Array) -> jax.Array:
    return tree_sum(window.astype(jnp.float32) * taps, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolution(policy, layout, x, ws, state, batch):
    taps = _own_taps(ws, layout)
    width = taps.shape[0]
    out = elementary.silu(_filter(_window(x, state, batch, width), taps)).astype(x.dtype)
    return out, _next_state(x, state, batch, width)


def _convolution_forward(policy, layout, x, ws, state, batch):
    return _convolution(policy, layout, x, ws, state, batch), (x, ws, state, batch)


def _convolution_backward(policy, layout, saved, cotangents):
    x, ws, state, batch = saved
    own = _own_taps(ws, layout)
    width, tokens = own.shape[0], x.shape[0]
    window = _window(x, state, batch, width)
    before = _filter(window, own)
    s = elementary.sigmoid(before)
    d = cotangents[0].astype(jnp.float32) * (s * (1.0 + before * (1.0 - s)))
    # row r fed the rows r .. r + width - 1 of its own sequence
    rows, taps = jnp.arange(tokens), []
    for ahead in range(width - 1, -1, -1):
        later = jnp.minimum(rows + ahead, tokens - 1)
        same = (batch.seq[later] == batch.seq) & (rows + ahead < tokens)
        taps.append(jnp.where(same[:, None], d[later], 0.0))
    dx = tree_sum(jnp.stack(taps, axis=1) * own, axis=1)
    terms = d[:, None, :] * window.astype(jnp.float32)
    leaves = token_leaves(terms, policy.row_leaves // layout.data)  # [leaves, width, C]
    sizes = [weight.value(w).shape[0] // layout.context for w in ws]
    parts = jnp.split(leaves, np.cumsum(sizes)[:-1], axis=2)
    dws = [pair_sum(join_parts(part, layout)).T for part in parts]
    return (
        dx.astype(x.dtype), tuple(map(weight.cotangent, ws, dws)), None, None
    )  # fmt: skip


_convolution.defvjp(_convolution_forward, _convolution_backward)


@op("causal_convolution", static=("policy", "layout"))
def causal_convolution(
    x: jax.Array,
    ws: tuple[Parameter, ...],
    state: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    *,
    policy: Policy,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """silu(conv(x)): x [T, C], state [L, slots, width - 1, C] -> (out [T, C], state).

    ws: taps [C_i, width] of groups of channels that lie side by side in x; C_i are this model
    rank's channels, of which x has those of this context rank. layer: int32 scalar, the entry of
    `state` to read and write.
    """
    out, new = _convolution(policy, layout, x, ws, state[layer], batch)
    return out, state.at[layer].set(new)
