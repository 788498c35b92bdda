"""Log-probabilities over a vocabulary: against float64, and decoding against training."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_logprob import (
    Gradients,
    Statistics,
    combine_leaves,
    linear_logprob_stats,
    logits_stats,
)
from pallas_kernels.linear_logprob_backward import linear_logprob_backward
from pallas_kernels.matmul import matmul
from pallas_kernels.tuning import MatmulTile
from tests.kernels import BF16, F32, I32, calls_mosaic, error, f64, interpreted, normal, same_bits

M, K, V, LEAVES = 5, 64, 1200, 2  # a leaf of 600 columns: two blocks and a part of one
TILE = MatmulTile(rows=64, cols=256, stages=2, warpgroups=1)


class Case:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.hidden, self.head = normal(1, M, K), normal(2, K, V) * jnp.asarray(0.2, BF16)
        self.targets = jnp.asarray([0, 599, 600, V - 1, -1], I32)
        self.inverse = jnp.asarray(rng.uniform(0.5, 2, M), F32)
        self.threshold = jnp.asarray([-np.inf, -1, 0, 0.5, 1], F32)
        self.z = f64(self.hidden) @ f64(self.head) * f64(self.inverse)[:, None]
        self.kept = self.z >= f64(self.threshold)[:, None]
        found = np.asarray(self.targets) >= 0
        self.logit = np.where(found, self.z[np.arange(M), np.asarray(self.targets)], -np.inf)
        self.lse = np.log(np.exp(self.z).sum(1))
        self.lse_kept = np.log((np.exp(self.z) * self.kept).sum(1))

    @functools.cached_property
    def training(self):
        with interpreted():
            return linear_logprob_stats(
                *(self.hidden, self.head, self.targets, self.inverse, self.threshold),
                leaves=LEAVES,
                tile=TILE,
            )


@pytest.fixture(scope="module")
def case():
    return Case()


def test_statistics(case):
    stats, logit = case.training
    z, kept = (x.reshape(M, LEAVES, -1) for x in (case.z, case.kept))
    top = z.max(2)
    e = np.exp(z - top[..., None])
    assert error(stats.maximum, top.T) < 1e-6
    assert error(stats.total, e.sum(2).T) < 1e-6
    assert error(stats.kept, (e * kept).sum(2).T) < 1e-6
    assert error(logit[:-1], case.logit[:-1]) < 1e-6 and logit[-1] == -np.inf


def test_leaves_finish_to_log_probabilities(case):
    stats, logit = case.training
    with interpreted():
        out = combine_leaves(stats, logit)
    expected = case.logit - case.lse, case.logit - case.lse_kept, case.lse, case.lse_kept
    for got, reference in zip(out, expected, strict=True):
        assert error(got[:-1], reference[:-1]) < 1e-6


def test_stored_logits_give_the_same_statistics(case):
    z = jnp.asarray(case.z, F32)
    with interpreted():
        stats = logits_stats(z, case.threshold, leaves=LEAVES)
    for got, reference in zip(stats, case.training[0], strict=True):
        assert error(got, f64(reference)) < 1e-6


def test_without_a_threshold_everything_is_kept(case):
    with interpreted():
        stats, logit = linear_logprob_stats(
            *(case.hidden, case.head, case.targets, case.inverse), leaves=LEAVES, tile=TILE
        )
        again = logits_stats(jnp.asarray(case.z, F32), leaves=LEAVES)
    whole, found = case.training  # the interpreter's sums are XLA's, which a second sum may move
    assert same_bits(stats.maximum, whole.maximum) and same_bits(logit, found)
    assert same_bits(stats.kept, stats.total) and error(stats.total, f64(whole.total)) < 1e-6
    assert error(again.kept, f64(whole.total)) < 1e-6


def test_backward_of_the_full_log_probability_alone(case):
    lse, grad = jnp.asarray(case.lse, F32), jnp.linspace(-1.0, 1.0, M, dtype=F32)
    with interpreted():
        d_hidden, _ = linear_logprob_backward(
            *(case.hidden, case.head, case.targets, case.inverse),
            Gradients(lse, grad),
            leaves=LEAVES,
        )
    hit = np.asarray(case.targets)[:, None] == np.arange(V)
    dz = (f64(grad) * f64(case.inverse))[:, None] * (hit - np.exp(case.z - case.lse[:, None]))
    assert error(d_hidden, dz @ f64(case.head).T) < 4e-3


def test_a_rank_with_one_leaf_has_that_leafs_statistics(case):
    width = V // LEAVES
    with interpreted():
        stats, logit = linear_logprob_stats(
            case.hidden,
            case.head[:, width:],
            case.targets - width,
            case.inverse,
            case.threshold,
            tile=TILE,
        )
    whole, found = case.training
    for got, reference in zip(stats, whole, strict=True):
        assert same_bits(got[0], reference[1])
    here = np.asarray(case.targets) >= width
    assert same_bits(logit[here], found[here]) and (np.asarray(logit)[~here] == -np.inf).all()


def test_backward(case):
    rng = np.random.default_rng(3)
    grad, grad_kept = (jnp.asarray(rng.standard_normal(M), F32) for _ in range(2))
    lse, lse_kept = jnp.asarray(case.lse, F32), jnp.asarray(case.lse_kept, F32)
    with interpreted():
        d_hidden, d_head = linear_logprob_backward(
            *(case.hidden, case.head, case.targets, case.inverse),
            Gradients(lse, grad, (case.threshold, lse_kept, grad_kept)),
            leaves=LEAVES,
        )
    hit = np.asarray(case.targets)[:, None] == np.arange(V)
    p, p_kept = (np.exp(case.z - x[:, None]) for x in (case.lse, case.lse_kept))
    dz = f64(grad)[:, None] * (hit - p) + f64(grad_kept)[:, None] * (hit - p_kept * case.kept)
    dz *= f64(case.inverse)[:, None]
    assert error(d_hidden, dz @ f64(case.head).T) < 4e-3
    assert error(d_head, f64(case.hidden).T @ dz) < 4e-3


def test_refusals():
    with pytest.raises(ValueError, match="does not split"):
        logits_stats(jnp.zeros((1, 100), F32), jnp.zeros(1), leaves=8)
    with pytest.raises(ValueError, match="float32"):
        logits_stats(jnp.zeros((1, 128), BF16), jnp.zeros(1))


def row(dtype=F32, m=10240):
    return ((m,), dtype)


def test_lowers_for_cuda():
    shapes = ((10240, 2048), BF16), ((2048, 248320), BF16), row(I32), row(), row()
    assert calls_mosaic(functools.partial(linear_logprob_stats, leaves=8), *shapes)
    assert calls_mosaic(functools.partial(logits_stats, leaves=8), ((64, 248320), F32), row(m=64))

    def finish(maximum, total, kept, logit):
        return combine_leaves(Statistics(maximum, total, kept), logit)

    assert calls_mosaic(finish, *[((8, 10240), F32)] * 3, row())

    def backward(hidden, head, targets, inverse, lse, grad, kept=None):
        gradients = Gradients(lse, grad, kept)
        return linear_logprob_backward(hidden, head, targets, inverse, gradients, leaves=2)

    def with_kept(*arguments):
        return backward(*arguments[:6], arguments[6:])

    head = ((2048, 62080), BF16)
    assert calls_mosaic(backward, shapes[0], head, row(I32), *[row()] * 3)
    assert calls_mosaic(with_kept, shapes[0], head, row(I32), *[row()] * 6)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 70])
def test_decoding_equals_training_on_a_device(m):
    hidden, head = normal(0, 70, K), normal(1, K, V)
    inverse = jnp.linspace(0.5, 2, 70)
    targets, threshold = jnp.arange(70, dtype=I32) * 17, jnp.zeros(70)
    stats, logit = linear_logprob_stats(hidden, head, targets, inverse, threshold, leaves=LEAVES)
    unfiltered, _ = linear_logprob_stats(hidden, head, targets, inverse, leaves=LEAVES)
    assert same_bits(unfiltered.total, stats.total)
    z = matmul(hidden[:m], head, out_dtype=F32) * inverse[:m, None]
    decoded = logits_stats(z, threshold[:m], leaves=LEAVES)
    assert same_bits(z[jnp.arange(m), targets[:m]], logit[:m])
    for got, reference in zip(decoded, stats, strict=True):
        assert same_bits(got, reference[:, :m])
