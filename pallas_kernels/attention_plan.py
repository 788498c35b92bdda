"""Work lists of the attention kernels, built on the device from the integers of a ragged batch.

A list says which rows and keys a thread block handles and in what order blocks start (longest
first). It is
deployment: no entry can change a bit of a result. Build it once a step; all layers share it.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

ROW_ALIGNMENT = 8  # rows of a swizzled shared-memory tile: query tiles start at such rows

# columns of a tile
TILE_ROW, TILE_POSITION, TILE_LOW, TILE_HIGH, TILE_SEQ, TILE_END, TILE_BLOCKS = range(7)
# columns of an item
ITEM_ROW, ITEM_POSITION, ITEM_SEQ, ITEM_SEGMENT, ITEM_BLOCKS = range(5)
COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Blocking:
    """Static numbers of the softmax and of the work lists.

    kv_block: keys of one softmax step. kv_segment: keys of one softmax state. Both move bits.
    tile_tokens: query tokens of a prefill tile: 64, or 128 when the two warpgroups share no KV head
      otherwise.
    """

    kv_block: int = 64
    kv_segment: int = 4096
    tile_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kv_block % 64 or self.kv_segment % self.kv_block:
            raise ValueError(
                f"kv_block ({self.kv_block}) must be a multiple of 64 and divide kv_segment "
                f"({self.kv_segment})"
            )


@partial(
    register_dataclass,
    data_fields=[
        "tiles", "tile_count", "items", "item_count", "segments", "padding", "padding_count",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Plan:
    """int32 work lists, longest entry first.

    tiles [NT, 8], tile_count [1]: tiles of query rows, with all keys before them (see the TILE_
      columns): first row (a multiple of 8) and its position (negative if the tile begins before its
      sequence), rows [low, high) that are its sequence's, the sequence, the end of the sequence's
      keys, KV blocks to visit.
    items [NI, 8], item_count [1]: one decoded token and one KV segment: row, position, sequence,
      segment, KV blocks of the segment to visit.
    segments [S]: KV segments of each sequence that decodes one token; 0 for every other.
    padding [T], padding_count [1]: rows of no sequence.
    """

    tiles: jax.Array
    tile_count: jax.Array
    items: jax.Array
    item_count: jax.Array
    segments: jax.Array
    padding: jax.Array
    padding_count: jax.Array


def _owner(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `size` entries, counts[s] in a row for each s: owner s, index in it, validity."""
    end = jnp.cumsum(counts)
    entry = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.sum(end <= entry[:, None], axis=1, dtype=jnp.int32)
    valid = owner < counts.shape[0]
    owner = jnp.where(valid, owner, 0)
    return owner, entry - (end - counts)[owner], valid


def padding_rows(start: jax.Array, length: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """int32 [T] rows of no sequence, in order, then anything; and how many there are [1]."""
    row = jnp.arange(tokens, dtype=jnp.int32)
    inside = (row >= start[:, None]) & (row < (start + length)[:, None])
    free = ~jnp.any(inside, axis=0)
    place = jnp.where(free, jnp.cumsum(free, dtype=jnp.int32) - 1, tokens)
    rows = jnp.zeros((tokens,), jnp.int32).at[place].set(row, mode="drop", unique_indices=True)
    return rows, jnp.sum(free, dtype=jnp.int32)[None]


def _longest_first(work: jax.Array, valid: jax.Array) -> jax.Array:
    """Permutation int32 [N]: valid entries by descending work, then the others.

    The lists are short, so that comparing all pairs in two kernels beats the many of a sort.
    """
    key = jnp.where(valid, work, -1)
    index = jnp.arange(key.shape[0], dtype=jnp.int32)
    ahead = (key > key[:, None]) | ((key == key[:, None]) & (index < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank == index[:, None], index, 0), axis=1, dtype=jnp.int32)


def _table(
    columns: list[jax.Array], work: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Columns as rows of a table, most work first, and the number of valid rows [1]."""
    table = jnp.stack(columns, axis=1).astype(jnp.int32)[_longest_first(work, valid)]
    table = jnp.pad(table, ((0, 0), (0, COLUMNS - len(columns))))
    return table, jnp.sum(valid, dtype=jnp.int32)[None]


def plan(
    start: jax.Array,
    length: jax.Array,
    context: jax.Array,
    *,
    tokens: int,
    max_keys: int,
    blocking: Blocking,
    decode: bool,
) -> Plan:
    """Work lists of one call.

    Args:
      start, length, context: int32 [S]; first row, new tokens and cached tokens of each sequence.
      tokens: T, rows of the batch. max_keys: most keys that a sequence may have.
      decode: whether sequences that contribute one token are split over KV segments (items) rather
        than made tiles of 64 rows.
    """
    block, rows = blocking.kv_block, blocking.tile_tokens
    single = (length == 1) if decode else jnp.zeros_like(length, bool)

    shift = start % ROW_ALIGNMENT
    count = jnp.where(single | (length == 0), 0, (shift + length + rows - 1) // rows)
    size = (tokens + start.shape[0] * (rows + ROW_ALIGNMENT - 2)) // rows
    seq, k, valid = _owner(count, size)
    row = start[seq] - shift[seq] + k * rows
    position = context[seq] - shift[seq] + k * rows
    low = jnp.maximum(start[seq] - row, 0)
    high = jnp.minimum(start[seq] + length[seq] - row, rows)
    blocks = (position + high - 1) // block + 1
    end = context[seq] + length[seq]
    tiles, tile_count = _table([row, position, low, high, seq, end, blocks], blocks, valid)

    per_segment = blocking.kv_segment // block
    blocks = jnp.where(single, context // block + 1, 0)
    segments = (blocks + per_segment - 1) // per_segment
    size = start.shape[0] * (-(-max_keys // blocking.kv_segment)) if decode else 1
    seq, k, valid = _owner(segments, size)
    work = jnp.minimum(blocks[seq] - k * per_segment, per_segment)
    items, item_count = _table([start[seq], context[seq], seq, k, work], work, valid)
    padding = padding_rows(start, length, tokens)
    return Plan(tiles, tile_count, items, item_count, segments, *padding)


# columns of a training tile
ROW, INDEX, COUNT, LENGTH, FIRST, PAIRS = range(6)


@partial(
    register_dataclass,
    data_fields=[
        "tiles", "by_query", "by_key", "by_two_keys", "two_count", "count", "rows", "tile",
        "offset", "padding", "padding_count",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """int32 work lists of the backward: whole sequences, cut into tiles of 64 tokens from their
    first.

    tiles [NT, 8]: the sequence's first row, index of the tile in the sequence, tiles and tokens of
      the sequence, number of the sequence's first tile, number of its first pair of tiles. Query
      tile i and key tile j <= i of a sequence are pair i (i + 1) / 2 + j of its own.
    by_query, by_key [NT]: tiles in the order in which to visit them as queries and as keys, most
      work first.
    by_two_keys [NT], two_count [1]: the same of every other tile of a sequence, the first included,
      each of which stands for itself and the next.
    count [1]: how many tiles there are.
    rows [NT, 64]: row of the batch of every place in a tile; T where there is none.
    tile, offset [T]: the inverse, tile and place of every row; tile = NT at padding rows.
    padding [T], padding_count [1]: rows of no sequence.
    """

    tiles: jax.Array
    by_query: jax.Array
    by_key: jax.Array
    by_two_keys: jax.Array
    two_count: jax.Array
    count: jax.Array
    rows: jax.Array
    tile: jax.Array
    offset: jax.Array
    padding: jax.Array
    padding_count: jax.Array


def plan_training(
    start: jax.Array, length: jax.Array, *, tokens: int, rows: int = 64
) -> TrainingPlan:
    """Work lists of one backward call.

    Args:
      start, length: int32 [S]; first row and tokens (0: unused entry) of each whole sequence.
      tokens: T. rows: tokens of a tile.
    """
    count = (length + rows - 1) // rows
    size = tokens // rows + start.shape[0]
    seq, index, valid = _owner(count, size)
    # Tiles, and pairs of tiles, of the sequences before each.
    first, pair_first = (jnp.cumsum(x) - x for x in (count, count * (count + 1) // 2))
    columns = [start[seq], index, count[seq], length[seq], first[seq], pair_first[seq]]
    tiles = jnp.stack([jnp.where(valid, c, 0) for c in columns], axis=1).astype(jnp.int32)

    inside = jnp.arange(rows, dtype=jnp.int32)
    place = index[:, None] * rows + inside
    used = valid[:, None] & (place < length[seq][:, None])
    row = jnp.where(used, start[seq][:, None] + place, tokens)
    # the inverse: a row's sequence, then its place
    at = jnp.arange(tokens, dtype=jnp.int32)
    whose = (at[:, None] >= start) & (at[:, None] < start + length)  # at most one
    of = lambda x: jnp.sum(jnp.where(whose, x, 0), axis=1, dtype=jnp.int32)  # noqa: E731
    inner = jnp.where(whose.any(axis=1), at - of(start), 0)
    tile = jnp.where(whose.any(axis=1), of(first) + inner // rows, size)
    padding, padding_count = padding_rows(start, length, tokens)
    return TrainingPlan(
        tiles=jnp.pad(tiles, ((0, 0), (0, COLUMNS - len(columns)))),
        by_query=_longest_first(index + 1, valid),
        by_key=_longest_first(count[seq] - index, valid),
        by_two_keys=_longest_first(count[seq] - index, valid & (index % 2 == 0)),
        two_count=jnp.sum(valid & (index % 2 == 0), dtype=jnp.int32)[None],
        count=jnp.sum(valid, dtype=jnp.int32)[None],
        rows=row,
        tile=tile,
        offset=inner % rows,
        padding=padding,
        padding_count=padding_count,
    )
