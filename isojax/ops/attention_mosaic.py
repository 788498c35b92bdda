"""Attention's Hopper evaluation: from a ragged batch and the op's pools to what the kernels take.

The arithmetic is in `pallas_kernels.attention*`. Its work lists are a function of a batch's
integers, so one `Work` serves every layer of a step.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from isojax.batch import RaggedBatch
from isojax.numerics.policy import Policy
from pallas_kernels import attention, attention_prefill
from pallas_kernels.attention_plan import Blocking, Plan, TrainingPlan
from pallas_kernels.attention_softmax import ROWS
from pallas_kernels.tuning import SHARED_MEMORY

# Query heads whose parts of dK and dV are summed before the tree over heads begins. A rank may
# hold a single query head, so that only 1 is the same sum on every mesh.
_CHAIN = 1


@partial(register_dataclass, data_fields=["forward", "backward"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Work:
    """Work lists of one call, int32; backward is None unless its sequences are whole."""

    forward: Plan
    backward: TrainingPlan | None


def _blocking(policy: Policy, heads: int, kv_heads: int) -> Blocking:
    return attention.blocking_of(heads, kv_heads, policy.kv_block, policy.kv_segment)


def _lists(batch: RaggedBatch) -> tuple[bool, bool]:
    """Whether tiles, and whether single tokens split over KV segments, may be in the work lists.
    Which of them has a sequence moves no bit of it.

    Tiles of 64 rows take pieces and whole sequences. Single tokens of the sampler are split over
    KV segments, which is the faster the longer their contexts; a training sequence of one row has
    no context and would not pay for another kernel.
    """
    return batch.whole or batch.piece_rows > 1, not batch.whole


def _check(policy: Policy, heads: int, page: int, kv_heads: int, width: int) -> None:
    """Raise ValueError for what the kernels cannot do."""
    instead = 'or set policy.evaluation = "reference"'
    if policy.compute_dtype != "bfloat16":
        raise ValueError(
            f"the attention kernels compute in bfloat16, not {policy.compute_dtype}: change "
            f"policy.compute_dtype, {instead}"
        )
    if width % 64 or not 64 <= width <= 256:
        raise ValueError(
            f"the attention kernels take heads of 64, 128, 192 or 256, not {width}: {instead[3:]}"
        )
    if heads // kv_heads > ROWS:
        raise ValueError(
            f"the attention kernels take at most {ROWS} query heads of a key/value head, "
            f"not {heads // kv_heads}: {instead[3:]}"
        )
    if policy.kv_block % 64 or policy.kv_block > 256:
        raise ValueError(
            f"the attention kernels take 64, 128, 192 or 256 keys in a block, not "
            f"{policy.kv_block}: change policy.kv_block, {instead}"
        )
    if attention_prefill.stages(width, policy.kv_block) < 1:
        raise ValueError(
            f"a block of {policy.kv_block} keys of {width} does not fit shared memory: lower "
            f"policy.kv_block, {instead}"
        )
    if page % 8 or (page % policy.kv_block and policy.kv_block % page):
        raise ValueError(
            f"a page of {page} tokens must be a multiple of 8, and it or policy.kv_block = "
            f"{policy.kv_block} a multiple of the other: change policy.chunk, {instead}"
        )
    if page > 256 or page * width * 4 > SHARED_MEMORY:  # a page of keys and values at a time
        raise ValueError(
            f"a page of {page} tokens with keys and values of {width} is too large to be written: "
            f"lower policy.chunk, {instead}"
        )


def plan(policy: Policy, heads: int, pool_shape: tuple[int, ...], batch: RaggedBatch) -> Work:
    """Work lists of a call.

    heads: query heads of this rank; pool_shape: [L, pages, page, Hkv, D].

    Raises:
      ValueError: where the kernels cannot serve the model under this policy.
    """
    _, _, page, kv_heads, width = pool_shape
    _check(policy, heads, page, kv_heads, width)
    tokens = batch.tokens.shape[0]
    forward = attention.plan_attention(
        batch.start, batch.length, batch.context, tokens=tokens,
        max_keys=batch.page_table.shape[1] * page, decode=_lists(batch)[1],
        blocking=_blocking(policy, heads, kv_heads),
    )  # fmt: skip
    if not batch.whole:
        return Work(forward, None)
    backward = attention.plan_attention_backward(batch.start, batch.length, tokens=tokens)
    return Work(forward, backward)


def forward(
    policy: Policy, scale: float, q, k, v, keys, values, layer, batch: RaggedBatch, work: Work, *,
    lse: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:  # fmt: skip
    """(out [T, Hq, D], log-sum-exp [T, Hq] if asked for, keys, values), see `ops.attention`."""
    if lse and not batch.whole:
        raise ValueError("the gradient is of whole sequences: build the batch with whole=True")
    tables = batch.page_table + layer * keys.shape[1]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    short = max(0, batch.piece_rows - k.shape[0])  # the write addresses a whole piece at least
    k, v = (jnp.pad(x, ((0, short), (0, 0), (0, 0))) for x in (k, v))
    k_pages, v_pages = attention.write_pages(
        k, v, flat(keys), flat(values), tables, batch.piece_seq, batch.piece_row, batch.piece_first,
        batch.piece_len, piece_rows=batch.piece_rows,
    )  # fmt: skip
    tiles, decode = _lists(batch)
    out, sums = attention.paged_attention(
        q, k_pages, v_pages, tables, batch.start, work.forward, scale=scale,
        blocking=_blocking(policy, q.shape[1], k.shape[1]), tiles=tiles, decode=decode, lse=lse,
    )  # fmt: skip
    return out, sums, k_pages.reshape(keys.shape), v_pages.reshape(values.shape)


@partial(jax.jit, static_argnames=("scale", "max_length"))
def backward(
    q, k, v, out, lse, dout, work: TrainingPlan, *, scale: float, max_length: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq in q's dtype; dk, dv float32 of this rank's query heads. max_length: of a sequence."""
    return attention.paged_attention_backward(
        q, k, v, out, lse, dout, work, scale=scale, max_length=max_length, chain=_CHAIN
    )
