"""The arrays of a call, laid out from a plan: all that a step reads but weights and cache."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from isojax.batch import Bucket, RaggedBatch
from isojax.sampler.lanes import Lanes
from isojax.sampler.sampling import Settings
from isojax.sampler.scheduler import Copies, Plan


@partial(
    register_dataclass,
    data_fields=["batch", "row", "inverse_temperature", "settings"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One rank's share of a call.

    batch: tokens to be read. row int32 [S]: sequence s is sampled after this row, its last new one.
    inverse_temperature float32 [S]. settings: [S], see `sampling.Settings`.
    """

    batch: RaggedBatch
    row: jax.Array
    inverse_temperature: jax.Array
    settings: Settings


def _pad(x: Any, size: int, value: int = 0) -> Any:
    """x behind which `value` fills its first axis up to `size`; integers become int32."""
    dtype = np.int32 if x.dtype == np.int64 else x.dtype
    out = np.full((size, *x.shape[1:]), value, dtype)
    out[: len(x)] = x
    return out


def lay_out(lanes: Lanes, plan: Plan, bucket: Bucket, chunk: int) -> StepInputs:
    """The inputs of one rank: its planned sequences end to end in the shape of `bucket`.

    The batch is what `isojax.batch.build` makes of the same segments.
    """
    slot, length = plan.slots, np.asarray(plan.counts, np.int32)
    n, context = len(slot), lanes.cached[slot]
    end, start = context + length, np.cumsum(length, dtype=np.int32) - length
    owner = np.repeat(np.arange(n, dtype=np.int32), length)
    position = np.arange(owner.size, dtype=np.int32) - start[owner] + context[owner]

    pieces = (end - 1) // chunk - context // chunk + 1
    of = np.repeat(np.arange(n, dtype=np.int32), pieces)
    number = np.arange(of.size, dtype=np.int32) - (np.cumsum(pieces) - pieces)[of]
    chunk_start = (context[of] // chunk + number) * chunk
    first = np.maximum(context[of], chunk_start)
    last = np.minimum(end[of], chunk_start + chunk)

    T, S, P = bucket.tokens, bucket.sequences, bucket.pieces
    batch = RaggedBatch(
        tokens=_pad(lanes.tokens[slot[owner], position], T),
        positions=_pad(position, T),
        seq=_pad(owner, T, S),
        start=_pad(start, S),
        length=_pad(length, S),
        context=_pad(context, S),
        slot=_pad(slot, S),
        page_table=_pad(lanes.pages[slot], S),
        piece_seq=_pad(of, P),
        piece_row=_pad(start[of] + first - context[of], P),
        piece_first=_pad(first, P),
        piece_len=_pad(last - first, P),
        piece_rows=bucket.piece_rows,
    )
    settings = Settings(
        key=_pad(lanes.key[slot], S),
        position=_pad(end, S),
        greedy=_pad(lanes.greedy[slot], S, 1),
        top_k=_pad(lanes.top_k[slot], S),
        top_p=_pad(lanes.top_p[slot], S, 1),
        min_p=_pad(lanes.min_p[slot], S),
    )
    return StepInputs(
        batch=batch,
        row=_pad(end - 1 - context + start, S),
        inverse_temperature=_pad(lanes.inverse_temperature[slot], S, 1),
        settings=settings,
    )


_WORDS = 64  # XLA hands kernels a part of a buffer where it lies, and they ask for 256-byte places


def _whole(size: int) -> int:
    return size + -size % _WORDS


def pack(ranks: list[StepInputs]) -> np.ndarray:
    """All ranks' inputs as int32 [ranks, N] (bit patterns): one transfer instead of twenty."""
    leaves = [jax.tree.leaves(rank) for rank in ranks]
    out = np.zeros((len(ranks), sum(_whole(leaf.size) for leaf in leaves[0])), np.int32)
    for row, own in zip(out, leaves, strict=True):
        at = 0
        for leaf in own:
            row[at : at + leaf.size] = np.ravel(leaf).view(np.int32)
            at += _whole(leaf.size)
    return out


def unpack(row: jax.Array, bucket: Bucket) -> StepInputs:
    """The inverse of `pack` for one rank, inside the step: int32 [N] -> StepInputs."""
    leaves, tree = jax.tree.flatten(shape_of(bucket))
    out, at = [], 0
    for leaf in leaves:
        part = row[at : at + leaf.size].reshape(leaf.shape)
        out.append(lax.bitcast_convert_type(part, leaf.dtype))
        at += _whole(leaf.size)
    return jax.tree.unflatten(tree, out)


def shape_of(bucket: Bucket) -> StepInputs:
    """Inputs of an empty call of this shape."""
    nothing = Plan([], [], Copies([], []))
    return lay_out(Lanes(0, 0, bucket.pages), nothing, bucket, bucket.piece_rows)
