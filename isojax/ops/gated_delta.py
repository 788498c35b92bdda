"""Gated delta rule (Gated DeltaNet's recurrence), where decode and training share every bit.

Per value head the recurrence over tokens is (Yang et al., "Gated Delta Networks", 2024; as in
Qwen3-Next)

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t

with unit k, unit q times K^-1/2, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). It is
evaluated by chunks of C absolute positions. With S the state at the chunk's start and G the sum of
g from there on,

    L_ij = beta_i exp(G_i - G_j) k_i.k_j     T_i = e_i - sum_{j<i} L_ij T_j    (T = (I + L)^-1)
    r_i  = beta_i (v_i - exp(G_i) S^T k_i)   d_i = sum_{j<=i} T_ij r_j
    o_i  = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i.k_j) d_j
    S'   = exp(G_C) S + sum_j k_j (exp(G_C - G_j) d_j)^T               (once every C tokens)

Row i reads rows up to i only. A prompt's chunks are evaluated many rows at once, decode evaluates
one row and keeps the open chunk's k, T, r, d and G beside S: the same operations on the same
operands.

Rounded to the compute dtype: q, k after normalisation, o. Rounded to `policy.delta`: T (before
later rows read it), r, d, the scores exp(G_i - G_j) q_i.k_j, exp(G_C - G_j) d_j, and the copy of S
that products read. Everything else, S and G among it, is float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import context_part, join_parts
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum
from isojax.ops import gated_delta_mosaic as mosaic
from isojax.ops import gated_delta_reference as reference
from isojax.ops.gated_delta_state import DeltaState, init_state, state_specs
from isojax.ops.kernel import call
from isojax.ops.op import op
from isojax.ops.token_terms import leaf_sums
from pallas_kernels import rows_gates as kernels

_ONE_RANK = Layout()

__all__ = ["DeltaState", "gated_delta", "init_state", "state_specs"]


@op("gated_delta", static=("policy", "layout"))
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
    layout: Layout = _ONE_RANK,
) -> tuple[jax.Array, DeltaState]:
    """One layer's gated delta rule over a ragged batch.

    q, k [T, Hk, K], v [T, Hv, V], a, b [T, Hv] in the compute dtype, the heads that this rank works
    on; A_log, dt_bias float32, [Hv] of the whole model rank, whatever context ranks share it. Value
    head h reads key head h // (Hv / Hk). state: leaves [layers, slots, ...], entry `layer` (int32
    scalar) is read and replaced. batch: a `RaggedBatch` of one rank; its piece_rows is the
    chunk length, or 1 when every sequence contributes one token. A sequence whose first new token
    is at position 0 starts from a zero state.

    Returns (out [T, Hv, V] in v's dtype, 0 at padding rows; state').

    Differentiable in q, k, v, a, b, A_log and dt_bias for whole sequences (context 0); the returned
    state carries no gradient. The gradients of A_log and dt_bias sum over tokens in leaves of rows.

    Raises:
      ValueError: if head counts do not divide, or piece_rows is neither 1 nor policy.chunk.
    """
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"{v.shape[1]} value heads do not share {k.shape[1]} key heads evenly")
    if batch.piece_rows not in (1, policy.chunk):
        raise ValueError(f"piece_rows is 1 or the chunk, {policy.chunk}; got {batch.piece_rows}")
    # Padding rows may hold anything, and gates are evaluated on all rows.
    real = (batch.seq < batch.start.shape[0])[:, None]
    a, b = jnp.where(real, a, 0), jnp.where(real, b, 0)
    return _gated_delta(policy, layout, (q, k, v, a, b, A_log, dt_bias), state, layer, batch)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_delta(policy, layout, inputs, state, layer, batch):
    gates = _gates(policy, layout, *inputs[3:])
    if policy.evaluation == "reference":
        return reference.forward(policy, inputs[:3], gates, state, layer, batch)
    if batch.piece_rows == 1:
        return mosaic.decode(policy, inputs[:3], gates, state, layer, batch)
    return mosaic.prefill(policy, inputs[:3], gates, state, layer, batch, save=False)[:2]


def _gated_delta_fwd(policy, layout, inputs, state, layer, batch):
    if policy.evaluation == "reference":
        return _gated_delta(policy, layout, inputs, state, layer, batch), (inputs, batch)
    gates = _gates(policy, layout, *inputs[3:])
    out, state, saved = mosaic.prefill(policy, inputs[:3], gates, state, layer, batch, save=True)
    return (out, state), (inputs, saved)


def _gated_delta_bwd(policy, layout, saved, cotangents):
    inputs, rest = saved
    if policy.evaluation == "reference":
        gates = _gates(policy, layout, *inputs[3:])
        by_token = reference.backward(policy, inputs[:3], gates, rest, cotangents[0])
    else:
        by_token = mosaic.backward(rest, cotangents[0])
    return _through_gates(policy, layout, inputs, by_token), None, None, None


_gated_delta.defvjp(_gated_delta_fwd, _gated_delta_bwd)


def _gates(policy, layout, a, b, A_log, dt_bias):
    """Log decay g and write strength beta, float32 [T, Hv]."""
    A_log, dt_bias = context_part(A_log, layout), context_part(dt_bias, layout)
    if policy.evaluation == "mosaic":
        return call(kernels.gates, a, b, A_log, dt_bias)
    x = a.astype(jnp.float32) + dt_bias
    softplus = jnp.maximum(x, 0) + elementary.log1p(elementary.exp(-jnp.abs(x)))
    return -elementary.exp(A_log) * softplus, elementary.sigmoid(b.astype(jnp.float32))


def _through_gates(policy: Policy, layout: Layout, inputs, by_token):
    """From the gradients of q, k, v, g and beta to those of the op's inputs."""
    q, k, v, a, b, A_log, dt_bias = inputs
    d_q, d_k, d_v, d_g, d_beta = by_token
    if policy.evaluation == "mosaic":
        weights = context_part(A_log, layout), context_part(dt_bias, layout)
        d_a, d_b, *terms = call(kernels.gates_backward, a, b, *weights, d_g, d_beta)
    else:
        g, beta = _gates(policy, layout, a, b, A_log, dt_bias)
        rate, bias = elementary.exp(context_part(A_log, layout)), context_part(dt_bias, layout)
        d_a = d_g * (-rate) * elementary.sigmoid(a.astype(jnp.float32) + bias)
        d_b = d_beta * (beta * (1 - beta))
        terms = [d_g * g, d_a]
    leaves = leaf_sums(jnp.stack(terms, axis=1), policy.row_leaves // layout.data, policy)
    d_A_log, d_bias = pair_sum(join_parts(leaves, layout))
    return (
        d_q.astype(q.dtype),
        d_k.astype(k.dtype),
        d_v.astype(v.dtype),
        d_a.astype(a.dtype),
        d_b.astype(b.dtype),
        d_A_log.astype(A_log.dtype),
        d_bias.astype(dt_bias.dtype),
    )
