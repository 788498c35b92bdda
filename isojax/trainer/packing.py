"""From a minibatch of sequences to the calls that train on it.

The minibatch is cut into `policy.batch_leaves` contiguous groups. A group is packed into
microbatches by itself, and microbatch m of every group together forms call m. Which rows a sequence
shares a leaf with is therefore a function of the minibatch alone: a mesh only decides which rank
holds which groups.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import register_dataclass

from isojax import batch as ragged
from isojax.batch import Bucket, RaggedBatch, Segment
from isojax.mesh import Layout
from isojax.numerics.policy import Policy


@dataclasses.dataclass(frozen=True)
class Example:
    """One whole sequence to train on or to score.

    tokens [L]: the token ids, prompt and response.
    prompt_length: how many of them are given; the rest, R = L - prompt_length, are predicted. At
      least 1.
    inverse_temperature: what logits are multiplied by before the softmax.
    threshold [R]: float32, where the sampler cut the vocabulary; None where it kept all of it.
    old_logp [R]: float32 log-probabilities under the policy that sampled, over the set it kept;
      None where that is the policy being trained, and always outside RL.
    advantage: of every predicted token.
    weight: 1 for a sequence that takes part in the loss, 0 for one that is filtered out.
    """

    tokens: np.ndarray
    prompt_length: int
    inverse_temperature: float = 1.0
    threshold: np.ndarray | None = None
    old_logp: np.ndarray | None = None
    advantage: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length < len(self.tokens):
            raise ValueError(
                f"an example of {len(self.tokens)} tokens cannot have {self.prompt_length} given: "
                "it needs at least one token given and one predicted"
            )

    @property
    def rows(self) -> int:
        """Rows it takes in a call: every token but the last is read to predict the next."""
        return len(self.tokens) - 1

    @property
    def predicted(self) -> int:
        """How many of its tokens are predicted (R)."""
        return len(self.tokens) - self.prompt_length


@partial(
    register_dataclass,
    data_fields=[
        "ragged", "targets", "inverse_temperature", "threshold", "old_logp", "advantage", "weight",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One call: a RaggedBatch and, for each of its rows, what the loss needs. Arrays are [T].

    targets int32: the token that the row predicts; 0 where nothing is asked.
    inverse_temperature, threshold, old_logp, advantage float32: see `Example`; 1, -inf, 0, 0
    elsewhere.
    weight float32: share of the row in the loss; 0 where nothing is asked.
    """

    ragged: RaggedBatch
    targets: jax.Array
    inverse_temperature: jax.Array
    threshold: jax.Array
    old_logp: jax.Array
    advantage: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where an example landed: its index, its call, the row of its first prediction."""

    index: int
    call: int
    row: int


def cut(lengths: Sequence[int], groups: int) -> list[range]:
    """Cut a minibatch into `groups` contiguous runs of about equal token counts."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    middles = ends * 2 - np.asarray(lengths)  # twice the centre of a sequence on the line of tokens
    group = np.minimum(middles * groups // max(2 * total, 1), groups - 1)
    bounds = np.searchsorted(group, np.arange(groups + 1))
    return [range(int(a), int(b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit packing of one group, in order: lists of indices of at most `budget` rows each.

    Raises:
      ValueError: if one sequence alone exceeds the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(
                f"a sequence of {length} tokens does not fit a microbatch leaf of {budget}: "
                "raise trainer.microbatch_tokens"
            )
        at = next((i for i, free in enumerate(room) if length <= free), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(budget)
        bins[at].append(index)
        room[at] -= length
    return bins


def bucket_of(
    parts: Sequence[Sequence[int]], budget: int, ranks: int, longest: int, chunk: int
) -> Bucket:
    """The static shape of a call on one data rank.

    parts: rows of the sequences of each leaf. budget: rows of a leaf. longest: rows of the longest
    sequence of all calls. Every call has all its rows; sequences and pieces are counted in powers
    of two, and enough of them for leaves full of long sequences, so that few programs serve all.
    """
    leaves = len(parts) // ranks
    pieces = max(sum(-(-rows // chunk) for rows in part) for part in parts)
    return Bucket(
        tokens=leaves * budget,
        sequences=leaves * _power_of_two(max(*map(len, parts), budget // longest)),
        pieces=leaves * _power_of_two(max(pieces, budget // chunk)),
        pages=-(-longest // chunk),
        piece_rows=chunk,
    )


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def pack(
    examples: Sequence[Example],
    budget: int,
    policy: Policy,
    layout: Layout,
    *,
    scale: float = 1.0,
    longest: int | None = None,
) -> tuple[list[TrainBatch], list[Placed]]:
    """Cut, pack and lay out a minibatch: the global arrays of each call, in order, and where all
    landed.

    budget: rows of one leaf, a multiple of `policy.chunk`. scale: multiplies every example's weight
    (one over the global count of tokens). longest: no sequence of any minibatch takes more rows; by
    default that is known of this one alone. Ranks' arrays are concatenated along the leading axis.

    Raises:
      ValueError: if the data ranks do not divide the leaves, the budget is no multiple of a chunk,
        or a sequence exceeds the budget.
    """
    leaves, ranks = policy.batch_leaves, layout.data
    if leaves % ranks:
        raise ValueError(f"{ranks} data ranks do not divide policy.batch_leaves = {leaves}")
    if budget < 1 or budget % policy.chunk:
        raise ValueError(
            f"a leaf of {budget} tokens is no multiple of policy.chunk = {policy.chunk}"
        )
    groups = [
        [[group[i] for i in part] for part in fill([examples[i].rows for i in group], budget)]
        for group in cut([example.rows for example in examples], leaves)
    ]
    calls, placed = [], []
    share = leaves // ranks
    longest = longest or max(example.rows for example in examples)
    for m in range(max(map(len, groups))):
        parts = [group[m] if m < len(group) else [] for group in groups]
        rows = [[examples[i].rows for i in part] for part in parts]
        bucket = bucket_of(rows, budget, ranks, longest, policy.chunk)
        batches = []
        for rank in range(ranks):
            mine = parts[rank * share : (rank + 1) * share]
            batches.append(_rank_batch(examples, mine, bucket, policy.chunk, scale))
            for leaf, part in enumerate(mine):
                row = rank * bucket.tokens + leaf * (bucket.tokens // share)
                for i in part:
                    placed.append(Placed(i, m, row + examples[i].prompt_length - 1))
                    row += examples[i].rows
        calls.append(jax.tree.map(lambda *xs: np.concatenate(xs), *batches))
    return calls, placed


def _rank_batch(
    examples: Sequence[Example], leaves: list[list[int]], bucket: Bucket, chunk: int, scale: float
) -> TrainBatch:
    def full(value: float, dtype: Any = np.float32) -> Any:
        return np.full(bucket.tokens, value, dtype)

    targets, inverse_temperature = full(0, np.int32), full(1)
    threshold, old_logp, advantage, weight = full(-np.inf), full(0), full(0), full(0)
    segments: list[Segment] = []
    page = 0
    for leaf, part in enumerate(leaves):
        row = leaf * (bucket.tokens // len(leaves))
        for i in part:
            example = examples[i]
            pages = -(-example.rows // chunk)
            segments.append(
                Segment(
                    example.tokens[:-1].tolist(), 0, range(page, page + pages), len(segments), row
                )
            )
            first = row + example.prompt_length - 1
            rows = slice(first, first + example.predicted)
            targets[rows] = example.tokens[example.prompt_length :]
            inverse_temperature[rows] = example.inverse_temperature
            advantage[rows] = example.advantage
            weight[rows] = np.float32(example.weight) * np.float32(scale)
            if example.threshold is not None:
                threshold[rows] = example.threshold
            old_logp[rows] = np.nan if example.old_logp is None else example.old_logp
            page += pages
            row += example.rows
    return TrainBatch(
        ragged.build(segments, bucket, chunk, whole=True),
        targets,
        inverse_temperature,
        threshold,
        old_logp,
        advantage,
        weight,
    )
