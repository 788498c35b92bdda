"""Packing is a function of the minibatch alone; it loses nothing; no sequence crosses a leaf."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.trainer.packing import Example, cut, fill, pack

POLICY = Policy(chunk=16, batch_leaves=4)
BUDGET = 64

lengths = st.lists(st.integers(2, BUDGET + 1), min_size=1, max_size=24)


def examples_of(lengths: list[int], seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        prompt = int(rng.integers(1, length))
        predicted = length - prompt
        found.append(
            Example(
                tokens=rng.integers(1, 1000, length).astype(np.int32),
                prompt_length=prompt,
                inverse_temperature=float(np.float32(rng.uniform(0.5, 2))),
                threshold=rng.normal(size=predicted).astype(np.float32),
                old_logp=-rng.random(predicted).astype(np.float32),
                advantage=float(np.float32(rng.normal())),
            )
        )
    return found


@given(lengths, st.sampled_from([1, 2, 4, 8]))
def test_cut_is_a_contiguous_partition(lengths, groups):
    parts = cut(lengths, groups)
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert len(parts) == groups
    mean = sum(lengths) / groups
    assert all(sum(lengths[i] for i in part) <= mean + max(lengths) for part in parts)


@given(lengths)
def test_fill_respects_the_budget(lengths):
    bins = fill(lengths, BUDGET + 1)
    assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
    assert all(
        part == sorted(part) and sum(lengths[i] for i in part) <= BUDGET + 1 for part in bins
    )


def test_a_sequence_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="microbatch_tokens"):
        fill([3, BUDGET + 1], BUDGET)


def test_an_example_needs_both_a_prompt_and_a_response():
    for prompt in (0, 3):
        with pytest.raises(ValueError, match="at least one token"):
            Example(np.arange(3, dtype=np.int32), prompt)


def rank_of(x: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    return x.reshape(ranks, -1)[rank]


@settings(deadline=None)
@given(lengths, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_every_token_lands_once_in_its_leaf(lengths, ranks, seed):
    examples = examples_of(lengths, seed)
    calls, placed = pack(examples, BUDGET, POLICY, Layout(data=ranks), scale=0.25)
    assert sorted(p.index for p in placed) == list(range(len(examples)))
    asked = 0
    for place in placed:
        example, call = examples[place.index], calls[place.call]
        first = place.row - (example.prompt_length - 1)
        rows = slice(first, first + example.rows)
        predicted = slice(place.row, place.row + example.predicted)
        leaf_rows = len(call.targets) // POLICY.batch_leaves
        assert first // leaf_rows == (first + example.rows - 1) // leaf_rows
        assert leaf_rows % POLICY.chunk == 0
        np.testing.assert_array_equal(call.ragged.tokens[rows], example.tokens[:-1])
        np.testing.assert_array_equal(call.ragged.positions[rows], np.arange(example.rows))
        assert len(set(call.ragged.seq[rows])) == 1
        np.testing.assert_array_equal(
            call.targets[predicted], example.tokens[example.prompt_length :]
        )
        np.testing.assert_array_equal(call.threshold[predicted], example.threshold)
        np.testing.assert_array_equal(call.old_logp[predicted], example.old_logp)
        assert (call.weight[predicted] == np.float32(0.25)).all()
        assert (call.advantage[predicted] == np.float32(example.advantage)).all()
        assert (call.inverse_temperature[rows][-1] == np.float32(example.inverse_temperature)).all()
        asked += example.predicted
    assert sum(int((call.weight > 0).sum()) for call in calls) == asked
    for call in calls:
        used = call.ragged.seq.reshape(ranks, -1) < len(call.ragged.length) // ranks
        assert (call.weight.reshape(ranks, -1)[~used] == 0).all()
        assert (call.inverse_temperature.reshape(ranks, -1)[~used] == 1).all()


@settings(deadline=None)
@given(lengths)
def test_leaves_do_not_depend_on_the_mesh(lengths):
    """Rows, targets and weights laid end to end are the same arrays on every mesh."""
    examples = examples_of(lengths)
    whole, placed = pack(examples, BUDGET, POLICY, Layout())
    for ranks in (2, 4):
        calls, at = pack(examples, BUDGET, POLICY, Layout(data=ranks))
        assert at == placed
        for a, b in zip(whole, calls, strict=True):
            for name in ("targets", "threshold", "old_logp", "advantage", "weight"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            np.testing.assert_array_equal(a.ragged.tokens, b.ragged.tokens)
            np.testing.assert_array_equal(a.ragged.positions, b.ragged.positions)


@given(lengths, lengths)
def test_later_sequences_do_not_move_earlier_ones(first, later):
    alone = fill(first, BUDGET + 1)
    both = fill(first + later, BUDGET + 1)
    assert [[i for i in part if i < len(first)] for part in both[: len(alone)]] == alone


def test_unused_entries_of_a_short_group_are_empty():
    calls, _ = pack(examples_of([BUDGET] * 5), BUDGET, POLICY, Layout(data=4))
    assert len(calls) == 2
    last = calls[-1]
    ranks_with_rows = (last.weight.reshape(4, -1) > 0).any(axis=1)
    assert ranks_with_rows.sum() == 1
    assert (rank_of(last.ragged.piece_len, int(np.argmin(ranks_with_rows)), 4) == 0).all()
    assert all(x.dtype in (np.int32, np.float32) for x in jax.tree.leaves(last))
