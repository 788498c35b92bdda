"""Ragged paged attention on Hopper: write new keys and values to pages, attend to them,
differentiate.

Rows of many sequences lie end to end; integers say whose they are (see `attention_plan`). A row's
result depends on its own query and the keys of its own sequence up to it, never on the batch, the
pages, or the kernel: decoding a token and training on it give the same bits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import attention_backward, attention_decode, attention_prefill
from pallas_kernels.attention_pages import write_pages as write_pages
from pallas_kernels.attention_plan import (
    ROW_ALIGNMENT,
    Blocking,
    Plan,
    TrainingPlan,
    plan,
    plan_training,
)
from pallas_kernels.attention_softmax import ROWS


def _pad_rows(x: jax.Array) -> jax.Array:
    """x [T, ...] with zero rows up to what the tile kernels can address."""
    rows = max(ROWS, -(-x.shape[0] // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def blocking_of(heads: int, kv_heads: int, kv_block: int = 64, kv_segment: int = 4096) -> Blocking:
    """Blocking of a call with these heads: see `attention_plan.Blocking`."""
    shared = attention_prefill.heads_per_block(heads // kv_heads) == 2
    return Blocking(kv_block, kv_segment, ROWS if shared else 2 * ROWS)


def plan_attention(
    start: jax.Array,
    length: jax.Array,
    context: jax.Array,
    *,
    tokens: int,
    max_keys: int,
    decode: bool,
    blocking: Blocking,
) -> Plan:
    """Work lists of `paged_attention`, for all layers of a step.

    Args:
      start, length, context: int32 [S]; first row, new tokens (0: unused entry), cached tokens of
        each sequence.
      tokens: T. max_keys: columns of the page table times tokens of a page.
      decode: whether sequences of one new token are split over KV segments (sampling). False makes
        every sequence tiles of 64 rows (training). It moves no bit.
      blocking: from `blocking_of`.
    """
    return plan(
        start, length, context, tokens=tokens, max_keys=max_keys, blocking=blocking, decode=decode
    )


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    work: Plan,
    *,
    scale: float,
    blocking: Blocking,
    tiles: bool,
    decode: bool,
    lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of new tokens over the pages of their sequences, themselves included.

    Args:
      q: bfloat16 [T, Hq, D], norm and rotary applied; D 64, 128, 192 or 256.
      k_pages, v_pages: bfloat16 [N, page, Hkv, D]; the new tokens' keys and values are in place.
        What lies beyond a sequence's last token is never used, whatever it is.
      page_table: int32 [S, M]; entry j of a sequence holds its positions [page j, page (j + 1)).
      start: int32 [S]; first row of each sequence.
      work, blocking: from `plan_attention`, `blocking_of`.
      scale: factor of q . k.
      tiles, decode: static; which of the plan's two lists may hold entries. `tiles` is False for a
        batch of single tokens, `decode` as it was for the plan.
      lse: static; also return the log-sum-exp (needs decode=False).
    Returns:
      out bfloat16 [T, Hq, D], zero at padding rows; natural log-sum-exp float32 [T, Hq] of the
      scaled scores, zero at padding rows, or None.
    Raises:
      ValueError: if lse is asked of a batch that decodes.
    """
    if lse and decode:
        raise ValueError("the log-sum-exp is kept for training only: plan with decode=False")
    tokens, heads, _ = q.shape
    out, sums = jnp.zeros(q.shape, q.dtype), None
    if tiles:
        out, sums = attention_prefill.prefill(
            _pad_rows(q), k_pages, v_pages, page_table, work, scale=scale, blocking=blocking,
            lse=lse,
        )  # fmt: skip
        out = out[:tokens]
    if decode:
        rows = attention_decode.decode(
            q, k_pages, v_pages, page_table, work, scale=scale, blocking=blocking
        )
        out = out.at[jnp.where(work.segments > 0, start, tokens)].set(rows, mode="drop")
    if sums is not None:
        at = attention_prefill.tile_rows(work, sums.shape[2], tokens)
        sums = jnp.zeros((tokens, heads)).at[at].set(jnp.swapaxes(sums, 1, 2), mode="drop")
    return out, sums


def plan_attention_backward(start: jax.Array, length: jax.Array, *, tokens: int) -> TrainingPlan:
    """Work lists of `paged_attention_backward`, for all layers of a step.

    Args:
      start, length: int32 [S]; first row and tokens of each whole sequence (0: unused entry).
      tokens: T.
    """
    return plan_training(start, length, tokens=tokens)


def paged_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    work: TrainingPlan,
    *,
    scale: float,
    max_length: int,
    chain: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient of `paged_attention` over whole sequences (context 0).

    Args:
      q, out, dout: bfloat16 [T, Hq, D]; k, v: bfloat16 [T, Hkv, D]; lse: float32 [T, Hq].
      work: from `plan_attention_backward`.
      scale: factor of q . k. max_length: static; most tokens of a sequence (sizes the scratch).
      chain: static; query heads of a KV head whose parts of dk and dv are summed one after the
        other. It moves bits: for gradients that do not depend on the mesh, no more than the query
        heads that a rank holds of a KV head on any mesh. Longer chains save memory traffic.
    Returns:
      dq bfloat16 [T, Hq, D]; dk, dv float32 [T, Hkv, D]: per KV head a balanced tree over
      neighbouring chains, for the caller to join with other ranks' and to round. Zero at padding
      rows.
    """
    short = max(0, ROWS - q.shape[0])  # a copy names a whole tile
    q, k, v, out, dout = (jnp.pad(x, ((0, short), (0, 0), (0, 0))) for x in (q, k, v, out, dout))
    return attention_backward.backward(
        q, k, v, out, lse, dout, work, scale=scale, max_length=max_length, chain=chain,
    )  # fmt: skip
