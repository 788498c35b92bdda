"""The gated delta rule's Hopper evaluation: from ragged rows to the tiles that the kernels take,
and back.

Gates (g, beta) are worked out by one kernel in every case; all other arithmetic of the forward is
in `pallas_kernels.gated_delta_*`, so that decode and prefill differ only in which kernel holds the
row.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import tree_sum
from isojax.ops.gated_delta_state import DeltaState
from pallas_kernels import gated_delta_backward, gated_delta_decode, gated_delta_prefill


@partial(
    register_dataclass,
    data_fields=["token", "valid", "offset", "length", "slot", "first", "count"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Chunk-aligned places of a batch's rows: row c of piece p is row c of its chunk."""

    token: jax.Array  # [P, C], 0 where not valid
    valid: jax.Array  # [P, C]
    offset: jax.Array  # [P]
    length: jax.Array  # [P]
    slot: jax.Array  # [P]
    first: jax.Array  # [S], the sequence's first piece
    count: jax.Array  # [S], its pieces

    def take(self, x: jax.Array) -> jax.Array:
        """x [T, H, ...] -> [P, H, C, ...], zeros at rows that are not valid."""
        rows = x[self.token]
        keep = self.valid.reshape(self.valid.shape + (1,) * (rows.ndim - 2))
        return jnp.moveaxis(jnp.where(keep, rows, 0), 1, 2)

    def put(self, x: jax.Array, tokens: int) -> jax.Array:
        """x [P, H, C, ...] -> [T, H, ...], zeros at tokens of no piece."""
        pieces, _, chunk = x.shape[:3]
        place = jnp.arange(pieces * chunk, dtype=jnp.int32).reshape(pieces, chunk)
        target = jnp.where(self.valid, self.token, tokens)
        source = jnp.full((tokens,), -1, jnp.int32).at[target].set(place, mode="drop")
        rows = x[source // chunk, :, source % chunk]
        return jnp.where((source >= 0).reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)


def tiles(batch: Any, chunk: int) -> Tiles:
    """Places of the pieces of `batch`; a sequence's pieces stand side by side."""
    sequences, pieces = batch.start.shape[0], batch.piece_len.shape[0]
    used = batch.piece_len > 0
    offset = jnp.where(used, batch.piece_first % chunk, 0)
    row = jnp.arange(chunk)
    valid = (row >= offset[:, None]) & (row < (offset + batch.piece_len)[:, None])
    seq = jnp.where(used, batch.piece_seq, sequences)
    index = jnp.arange(pieces, dtype=jnp.int32)
    return Tiles(
        token=jnp.where(valid, (batch.piece_row - offset)[:, None] + row, 0),
        valid=valid,
        offset=offset,
        length=batch.piece_len,
        slot=batch.slot[jnp.where(used, batch.piece_seq, 0)],
        first=jnp.full((sequences,), pieces, jnp.int32).at[seq].min(index, mode="drop"),
        count=jnp.zeros((sequences,), jnp.int32).at[seq].add(1, mode="drop"),
    )


def _check(policy: Policy, k: jax.Array, v: jax.Array) -> None:
    if policy.compute_dtype != "bfloat16" or policy.delta_dtype != "bfloat16" or policy.chunk != 64:
        raise ValueError("the Hopper evaluation computes in bfloat16 with chunks of 64")
    if k.shape[2] % 64 or v.shape[2] % 64:
        raise ValueError(f"head widths are multiples of 64, got {k.shape[2]} and {v.shape[2]}")


def decode(
    policy: Policy, inputs, gates, state: DeltaState, layer, batch
) -> tuple[jax.Array, DeltaState]:
    """One token a sequence -> (out [T, Hv, V], state'), see `gated_delta`."""
    q, k, v = inputs
    _check(policy, k, v)
    used = (batch.piece_len > 0).astype(jnp.int32)
    row = batch.piece_first % policy.chunk
    fresh = (batch.piece_first < policy.chunk).astype(jnp.int32)
    slot = batch.slot[jnp.where(used > 0, batch.piece_seq, 0)]
    g, beta = gates
    token, at = batch.piece_row, jnp.reshape(layer, (1,)).astype(jnp.int32)
    held = jax.tree.map(jax.new_ref, state)
    kept = (held.keys, held.inverse, held.decay)
    read = (held.state, held.operand, held.keys, held.residual, held.update, held.decay)
    out = jax.new_ref(jnp.zeros(v.shape, v.dtype))
    pad = -k.shape[0] * k.shape[1] % policy.chunk
    q, k = (jnp.pad(x.reshape(-1, x.shape[2]), ((0, pad), (0, 0))) for x in (q, k))
    x = gated_delta_decode.normalize(q, k, epsilon=policy.l2_epsilon)
    y = gated_delta_decode.prepare_row(x, g, beta, token, row, used, slot, at, *kept)
    gated_delta_decode.advance_row(x, v, beta, y, fresh, token, row, used, slot, at, *read, out)
    return jax.freeze(out), jax.tree.map(jax.freeze, held)


def prefill(
    policy: Policy, inputs, gates, state: DeltaState, layer, batch, *, save: bool
) -> tuple[jax.Array, DeltaState, tuple]:
    """Any pieces -> (out [T, Hv, V], state', what `backward` reads if `save`)."""
    q, k, v = inputs
    _check(policy, k, v)
    place = tiles(batch, policy.chunk)
    at = jnp.reshape(layer, (1,)).astype(jnp.int32)
    held = jax.tree.map(jax.new_ref, state)
    g, beta = (place.take(x) for x in gates)
    q, k, factors, G, T, scores = gated_delta_prefill.prepare(
        place.take(q), place.take(k), g, beta, place.offset, place.slot, at,
        held.keys, held.inverse, held.decay, epsilon=policy.l2_epsilon,
    )  # fmt: skip
    value = place.take(v)
    fresh = (batch.context == 0).astype(jnp.int32)
    o, *rest = gated_delta_prefill.advance(
        q, k, value, G, beta, T, scores, place.offset, place.length, place.first, place.count,
        fresh, batch.slot, at, tuple(jax.tree.leaves(held)), save=save,
    )  # fmt: skip
    saved = (place, q, k, factors, value, G, beta, T, scores, *rest) if save else ()
    return place.put(o, v.shape[0]), jax.tree.map(jax.freeze, held), saved


@jax.jit
def backward(saved: tuple, d_out: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients by token from what `prefill` saved and d_out [T, Hv, V].

    Returns d_q, d_k [T, Hk, K], d_v [T, Hv, V] in bfloat16, d_g, d_beta [T, Hv] float32.
    """
    place, q, k, factors, v, G, beta, T, scores, entry, d = saved
    tokens = d_out.shape[0]
    d_o = place.take(d_out)
    d_residual, d_after = gated_delta_backward.retreat(
        q, k, d_o, G, beta, T, scores, place.first, place.count
    )
    d_q, d_k, d_v, d_G, d_beta, faded, stated = gated_delta_backward.gradients(
        q, k, factors, v, G, beta, d_o, d, d_residual, entry, d_after
    )
    # G of the last row also decays the state and every row's share in the next one.
    last = tree_sum(faded) + elementary.exp(G[..., -1]) * tree_sum(stated)
    d_G = d_G.at[..., -1].add(last)
    # g of row j enters G of rows j and later: sums from the end, by doubling.
    step = 1
    while step < d_G.shape[-1]:
        d_G = d_G + jnp.pad(d_G[..., step:], ((0, 0), (0, 0), (0, step)))
        step *= 2
    return tuple(place.put(x, tokens) for x in (d_q, d_k, d_v, d_G, d_beta))
