"""Sampling: bits that are documented, thresholds that a sort confirms, draws from the right law, and rows
that know nothing of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isojax.sampler.random import sample_key, threefry
from isojax.sampler.sampling import Settings, _gumbel, sample
from tests.util import assert_same_bits

INF = np.inf


def rows(z, *, seed=0, greedy=0, top_k=0, top_p=1.0, min_p=0.0, position=None):
    """Settings that are the same in every row of z, with positions 0, 1, ..."""
    n = len(z)
    fill = lambda value, dtype: np.full(n, value, dtype)  # noqa: E731
    return Settings(
        key=np.tile(sample_key(seed, 0), (n, 1)),
        position=np.arange(n, dtype=np.int32) if position is None else position,
        greedy=fill(greedy, np.int32),
        top_k=fill(top_k, np.int32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
    )


@pytest.mark.parametrize(
    "key, counter, want",
    [  # known answers of Random123, the reference implementation
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
@pytest.mark.parametrize("module", [np, jnp])
def test_threefry_is_the_published_one(module, key, counter, want):
    word = lambda x: module.asarray([x], module.uint32)  # noqa: E731
    got = threefry(tuple(map(word, key)), tuple(map(word, counter)))
    assert tuple(int(x[0]) for x in got) == want


def test_keys_differ_by_seed_and_sample():
    seeds = (0, 1, 2**32, 2**32 + 1, 2**64 - 1)
    keys = {tuple(sample_key(seed, i).tolist()) for seed in seeds for i in range(20)}
    assert len(keys) == 100


def test_gumbel_variables():
    position = jnp.arange(64, dtype=jnp.int32)
    g = np.asarray(_gumbel(jnp.asarray(np.tile(sample_key(3, 1), (64, 1))), position, 4096))
    assert np.isfinite(g).all() and len(np.unique(g)) > 0.95 * g.size
    assert abs(g.mean() - np.euler_gamma) < 0.01 and abs(g.var() - np.pi**2 / 6) < 0.03
    assert abs(np.corrcoef(g[:-1].ravel(), g[1:].ravel())[0, 1]) < 0.01


def law(z):
    p = np.exp(z - z.max())
    return p / p.sum()


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_draws_follow_the_softmax_of_the_kept_set(cut):
    z = np.array([1.0, -1.0, 0.5, 2.0, -3.0, 0.0, 1.5, -0.5], np.float32)
    many = np.tile(z, (20_000, 1))
    tokens, threshold = map(np.asarray, sample(many, rows(many, **cut)))
    assert len(set(threshold.tolist())) == 1
    kept = z >= threshold[0]
    want = law(np.where(kept, z, -INF))
    assert kept.sum() == {"": 8, "top_k": 3, "top_p": 4, "min_p": 4}["".join(cut)]
    got = np.bincount(tokens, minlength=8) / len(tokens)
    assert (got[~kept] == 0).all()
    assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / len(tokens))


def kept_by_sorting(z, top_k, top_p, min_p):
    """The kept set in float64, ties with the last kept token kept."""
    order = np.sort(z.astype(np.float64))[::-1]
    least = order[top_k - 1] if 0 < top_k < len(z) else -INF
    if top_p < 1:
        p = law(order[order >= least])
        least = max(least, order[np.searchsorted(np.cumsum(p), np.float32(top_p) * (1 - 1e-6))])
    if min_p > 0:
        least = max(least, order[0] + np.log(np.float64(min_p)))
    return z >= least


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 37, 300]),
    ties=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-3]),
    min_p=st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
)
def test_thresholds_equal_a_sort(seed, vocab, ties, top_k, top_p, min_p):
    random = np.random.default_rng(seed)
    z = (random.normal(size=(4, vocab)) * 3).astype(np.float32)
    if ties:
        z = np.round(z)
    cut = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, threshold = map(np.asarray, sample(z, rows(z, seed=seed, **cut)))
    for row, token, least in zip(z, tokens, threshold, strict=True):
        want = kept_by_sorting(row, **cut)
        assert np.array_equal(row >= least, want)
        assert least == (-INF if want.all() else row[want].min())
        assert want[token]
    # the place of a token in the vocabulary has no say in what is kept
    again = np.asarray(sample(z[:, ::-1], rows(z, **cut))[1])
    assert_same_bits(again + 0.0, threshold + 0.0)


def test_zeros_of_both_signs_are_one_tie():
    z = np.array([[-0.0, 0.0, -1.0, -0.0]], np.float32)
    for top_k in (1, 2, 3):
        threshold = np.asarray(sample(z, rows(z, top_k=top_k))[1])
        assert (z[0] >= threshold[0]).tolist() == [True, True, False, True]


def test_greedy_takes_the_first_of_the_largest():
    z = np.array([[0.0, 5.0, 5.0, 1.0], [2.0, -0.0, 0.0, 2.0]], np.float32)
    tokens, threshold = sample(z, rows(z, greedy=1, top_k=1, top_p=0.1))
    assert tokens.tolist() == [1, 0] and threshold.tolist() == [-INF, -INF]


def test_rows_know_nothing_of_each_other():
    random = np.random.default_rng(0)
    z = (random.normal(size=(13, 515)) * 2).astype(np.float32)
    z[3] *= 1e-40  # subnormal
    s = rows(z, position=random.integers(0, 999, 13).astype(np.int32))
    s = s._replace(
        top_k=random.choice([0, 7, 200], 13).astype(np.int32),
        top_p=random.choice([1.0, 0.9, 0.3], 13).astype(np.float32),
        greedy=random.integers(0, 2, 13).astype(np.int32),
    )
    want = sample(z, s)
    order = random.permutation(13)
    pick = lambda tree, index: jax.tree.map(lambda x: x[index], tree)  # noqa: E731
    assert_same_bits(sample(z[order], pick(s, order)), pick(want, order))
    for i in range(13):
        at = np.array([i])
        assert_same_bits(sample(z[at], pick(s, at)), pick(want, at))


def test_a_token_is_a_function_of_its_position_and_key():
    z = np.zeros((200, 64), np.float32)
    here = np.full(200, 5, np.int32)
    assert len(set(np.asarray(sample(z, rows(z, position=here))[0]).tolist())) == 1
    assert len(set(np.asarray(sample(z, rows(z))[0]).tolist())) > 40
    other = np.asarray(sample(z, rows(z, seed=1))[0])
    assert (other != np.asarray(sample(z, rows(z))[0])).mean() > 0.9
