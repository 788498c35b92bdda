"""RaggedBatch: the tokens of many sequences laid end to end, with the integers that describe them.

A sequence contributes one token (decode), a run of its prompt (chunked prefill) or everything
(training), mixed freely in one call. All floating-point meaning follows from these integers; none
of them may change a bit of a row.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Static shape of a batch on one data rank: what a compiled program is specialised to.

    tokens T, sequences S, pieces P, pages M (columns of the page table), piece_rows R (rows that a
    piece may hold: the chunk length, or 1 when every sequence contributes one token).
    """

    tokens: int
    sequences: int
    pieces: int
    pages: int
    piece_rows: int


@partial(
    register_dataclass,
    data_fields=[
        "tokens", "positions", "seq", "start", "length", "context", "slot", "page_table",
        "piece_seq", "piece_row", "piece_first", "piece_len",
    ],
    meta_fields=["piece_rows", "whole"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """int32 arrays of one data rank (or of all ranks, concatenated along the leading axis).

    tokens [T]: token ids; 0 at padding rows.
    positions [T]: position in the own sequence; 0 at padding rows.
    seq [T]: index of the own sequence in [0, S); S at padding rows.
    start [S]: row of the sequence's first new token.
    length [S]: how many new tokens it contributes; 0 marks an unused entry.
    context [S]: how many of its tokens are cached already.
    slot [S]: its slot of recurrent state.
    page_table [S, M]: entry j is the page that holds positions [j * page, (j + 1) * page).
    piece_seq, piece_row, piece_first, piece_len [P]: a piece is a run of new tokens of one sequence
      inside one chunk of positions: its sequence, the row and the position of its first token, its
      length (0: unused). The pieces of a sequence stand in order.
    piece_rows: static; the most rows a piece may have.
    whole: static; every sequence is all there (context 0), as a gradient needs it.
    """

    tokens: jax.Array
    positions: jax.Array
    seq: jax.Array
    start: jax.Array
    length: jax.Array
    context: jax.Array
    slot: jax.Array
    page_table: jax.Array
    piece_seq: jax.Array
    piece_row: jax.Array
    piece_first: jax.Array
    piece_len: jax.Array
    piece_rows: int
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Segment:
    """What one sequence contributes to a call.

    tokens: the new token ids. context: how many tokens are cached before them. pages: the pages
    that hold positions [0, context + len(tokens)), in order. slot: its slot of recurrent state.
    row: where to put its first token (default: right after the segment before it).
    """

    tokens: Sequence[int]
    context: int
    pages: Sequence[int]
    slot: int
    row: int | None = None


def build(
    segments: Sequence[Segment], bucket: Bucket, chunk: int, *, whole: bool = False
) -> RaggedBatch:
    """Lay segments end to end in the shape of `bucket`, as NumPy arrays.

    whole: see `RaggedBatch`.

    Raises:
      ValueError: if they do not fit the bucket, or continue a sequence in a batch of whole ones.
    """
    if whole and any(segment.context for segment in segments):
        raise ValueError("whole sequences have no cached tokens")
    tokens, positions = np.zeros((2, bucket.tokens), np.int32)
    seq = np.full(bucket.tokens, bucket.sequences, np.int32)
    start, length, context, slot = np.zeros((4, bucket.sequences), np.int32)
    page_table = np.zeros((bucket.sequences, bucket.pages), np.int32)
    pieces: list[tuple[int, int, int, int]] = []
    if len(segments) > bucket.sequences:
        raise ValueError(f"{len(segments)} sequences do not fit a bucket of {bucket.sequences}")
    row = 0
    for index, segment in enumerate(segments):
        row = row if segment.row is None else segment.row
        count, first = len(segment.tokens), segment.context
        if row + count > bucket.tokens or len(segment.pages) > bucket.pages:
            raise ValueError(
                f"sequence {index} (rows {row} to {row + count}, {len(segment.pages)} pages) "
                f"does not fit {bucket}"
            )
        if bucket.piece_rows == 1 and count > 1:
            raise ValueError(f"sequence {index}: a decode call takes one token, not {count}")
        rows = slice(row, row + count)
        tokens[rows] = segment.tokens
        positions[rows] = np.arange(first, first + count)
        seq[rows] = index
        start[index], length[index], context[index], slot[index] = row, count, first, segment.slot
        page_table[index, : len(segment.pages)] = segment.pages
        at = first
        while at < first + count:
            end = min(first + count, (at // chunk + 1) * chunk, at + bucket.piece_rows)
            pieces.append((index, row + at - first, at, end - at))
            at = end
        row += count
    if len(pieces) > bucket.pieces:
        raise ValueError(f"{len(pieces)} pieces do not fit a bucket of {bucket.pieces}")
    columns = np.zeros((4, bucket.pieces), np.int32)
    if pieces:
        columns[:, : len(pieces)] = np.asarray(pieces, np.int32).T
    piece_seq, piece_row, piece_first, piece_len = columns
    fields: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "seq": seq,
        "start": start,
        "length": length,
        "context": context,
        "slot": slot,
        "page_table": page_table,
        "piece_seq": piece_seq,
        "piece_row": piece_row,
        "piece_first": piece_first,
        "piece_len": piece_len,
    }
    return RaggedBatch(**fields, piece_rows=bucket.piece_rows, whole=whole)


def pad_rows(batch: RaggedBatch, multiple: int) -> RaggedBatch:
    """A rank's batch with padding rows behind it, up to a multiple: ranks may share its rows."""
    extra = -batch.tokens.shape[0] % multiple
    if extra == 0:
        return batch
    unused = batch.start.shape[0]
    pad = lambda x, value: jnp.pad(x, (0, extra), constant_values=value)  # noqa: E731
    return dataclasses.replace(
        batch,
        tokens=pad(batch.tokens, 0),
        positions=pad(batch.positions, 0),
        seq=pad(batch.seq, unused),
    )


def concatenate(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """The batches of all data ranks as one, along the leading axis."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
