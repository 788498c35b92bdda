import numpy as np
import pytest

from isojax.rl.advantages import (
    DynamicBatch,
    contributes,
    group_advantages,
    has_variance,
    overlong_penalties,
)


def test_advantages_by_hand():
    got = group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]], np.float32))
    std = np.sqrt(4 * 0.25 / 3)
    np.testing.assert_allclose(got[0], np.array([0.5, -0.5, -0.5, 0.5]) / std, rtol=1e-6)
    assert got.dtype == np.float32
    assert (got[1].view(np.int32) == 0).all()  # exact zeros although 0.1 * 4 / 4 may round


def test_advantages_without_the_standard_deviation():
    got = group_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), normalize_by_std=False)
    assert got.tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_advantages_of_a_group_do_not_depend_on_the_others():
    rewards = np.random.default_rng(0).random((9, 7)).astype(np.float32)
    whole = group_advantages(rewards)
    for i in range(9):
        alone = group_advantages(rewards[i : i + 1])[0]
        assert (alone.view(np.int32) == whole[i].view(np.int32)).all()
    np.testing.assert_allclose(whole.sum(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(whole.std(axis=1, ddof=1), 1, rtol=1e-6)


def test_variance():
    assert has_variance(np.array([[0, 1], [1, 1], [0, 0]])).tolist() == [True, False, False]


def test_overlong_penalties():
    lengths = np.array([0, 6, 7, 8, 9, 10, 11])
    got = overlong_penalties(lengths, max_tokens=10, buffer=4, penalty=2.0)
    assert got.tolist() == [0, 0, -0.5, -1, -1.5, -2, -2]
    assert not np.signbit(got[:2]).any() and got.dtype == np.float32
    hard = overlong_penalties(lengths, max_tokens=10, buffer=0)
    assert hard.tolist() == [0, 0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize("overlong_filter", [False, True])
def test_overlong_filter(overlong_filter):
    got = contributes(np.array([True, False]), overlong_filter=overlong_filter)
    assert got.tolist() == [not overlong_filter, True]


FLAT, MIXED = [1.0, 1.0], [0.0, 1.0]


def test_dynamic_batch_fills_over_rounds():
    batch = DynamicBatch[str](size=3, max_rounds=5)
    batch.add(["a", "b", "c"], np.array([FLAT, MIXED, FLAT]))
    assert batch.missing == 2
    with pytest.raises(RuntimeError, match="2 of 3"):
        batch.take()
    batch.add(["d", "e", "f"], np.array([MIXED, MIXED, MIXED]))
    assert batch.missing == 0 and batch.take() == ["b", "d", "e"]
    assert (batch.rounds, batch.dropped, batch.surplus) == (2, 2, 1)


def test_dynamic_batch_is_filled_up_at_the_limit():
    batch = DynamicBatch[int](size=4, max_rounds=2)
    batch.add([0, 1], np.array([FLAT, MIXED]))
    batch.add([2, 3], np.array([FLAT, FLAT]))
    assert batch.missing == 0 and batch.take() == [1, 0, 2, 3] and batch.dropped == 0


def test_dynamic_batch_may_keep_all():
    batch = DynamicBatch[int](size=2, max_rounds=1, keep_all=True)
    batch.add([0, 1], np.array([FLAT, FLAT]))
    assert batch.take() == [0, 1]
