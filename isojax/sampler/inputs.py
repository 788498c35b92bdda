"""The arrays of a call, laid out from a plan: all that a step reads but weights and cache."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from isojax.batch import Bucket, RaggedBatch
from isojax.sampler.request import inverse_temperature
from isojax.sampler.sampling import Settings
from isojax.sampler.scheduler import Sequence


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


class Lanes:
    """The running sequences of one rank as arrays over its slots.

    A lane is filled when a sequence gets its slot; afterwards only new tokens and pages are
    entered, so that laying out a call takes a few array operations.
    """

    def __init__(self, slots: int, max_model_len: int, table_width: int) -> None:
        self._owner: list[tuple[Sequence, list[int]] | None] = [None] * slots
        self._page_count = np.zeros(slots, np.int32)
        self.tokens = np.zeros((slots, max_model_len), np.int32)
        self.pages = np.zeros((slots, table_width), np.int32)
        self.inverse_temperature = np.ones(slots, np.float32)
        self.key = np.zeros((slots, 2), np.uint32)
        self.greedy, self.top_k = (np.zeros(slots, np.int32) for _ in range(2))
        self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(2))

    def enter(self, seq: Sequence) -> None:
        """Bring a sequence's lane up to date."""
        slot, owner = seq.slot, self._owner[seq.slot]
        # a sequence that was preempted and came back to its slot has another list of pages
        if owner is None or owner[0] is not seq or owner[1] is not seq.pages:
            self._fill(seq)
        else:
            self.tokens[slot, len(seq.tokens) - 1] = seq.tokens[-1]
        known = self._page_count[slot]
        if len(seq.pages) > known:
            self.pages[slot, known : len(seq.pages)] = seq.pages[known:]
            self._page_count[slot] = len(seq.pages)

    def _fill(self, seq: Sequence) -> None:
        slot, request = seq.slot, seq.request
        self._owner[slot] = (seq, seq.pages)
        self._page_count[slot] = 0
        self.tokens[slot, : len(seq.tokens)] = seq.tokens
        self.inverse_temperature[slot] = inverse_temperature(request.temperature)
        self.key[slot] = seq.key
        self.greedy[slot] = request.temperature == 0
        self.top_k[slot] = min(request.top_k, np.iinfo(np.int32).max)
        self.top_p[slot] = request.top_p
        self.min_p[slot] = request.min_p


def _pad(x: Any, size: int, value: int = 0) -> Any:
    """x behind which `value` fills its first axis up to `size`; integers become int32."""
    dtype = np.int32 if x.dtype == np.int64 else x.dtype
    out = np.full((size, *x.shape[1:]), value, dtype)
    out[: len(x)] = x
    return out


def lay_out(
    lanes: Lanes, work: list[tuple[Sequence, int]], bucket: Bucket, chunk: int
) -> StepInputs:
    """The inputs of one rank: its planned sequences end to end in the shape of `bucket`.

    The batch is what `isojax.batch.build` makes of the same segments.
    """
    for seq, _ in work:
        lanes.enter(seq)
    n = len(work)
    slot = np.fromiter((seq.slot for seq, _ in work), np.int32, n)
    context = np.fromiter((seq.cached for seq, _ in work), np.int32, n)
    length = np.fromiter((count for _, count in work), np.int32, n)
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


def pack(ranks: list[StepInputs]) -> np.ndarray:
    """All ranks' inputs as int32 [ranks, N] (bit patterns): one transfer instead of twenty."""
    rows = [
        np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(inputs)])
        for inputs in ranks
    ]
    return np.stack(rows)


def unpack(row: jax.Array, bucket: Bucket) -> StepInputs:
    """The inverse of `pack` for one rank, inside the step: int32 [N] -> StepInputs."""
    leaves, tree = jax.tree.flatten(shape_of(bucket))
    out, at = [], 0
    for leaf in leaves:
        part = row[at : at + leaf.size].reshape(leaf.shape)
        out.append(lax.bitcast_convert_type(part, leaf.dtype))
        at += leaf.size
    return jax.tree.unflatten(tree, out)


def shape_of(bucket: Bucket) -> StepInputs:
    """Inputs of an empty call of this shape."""
    return lay_out(Lanes(0, 0, bucket.pages), [], bucket, max(bucket.piece_rows, 1))
