"""The policy loss against its formula in float64, at and around every edge of clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.trainer.loss import (
    STATS,
    PolicyLoss,
    policy_loss,
    rank_total,
    token_total,
)

LOW, HIGH, DUAL = 0.2, 0.28, 10.0
BOUNDS = (LOW, HIGH, DUAL)


def formula(logp, old, advantage, weight):
    """DAPO eq. 8 with dual clip: loss and its derivative by logp, float64."""
    logp, old, advantage, weight = (
        np.asarray(x, np.float64) for x in (logp, old, advantage, weight)
    )
    ratio = np.exp(logp - old)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    objective = np.where(advantage < 0, np.maximum(objective, DUAL * advantage), objective)
    live = objective == ratio * advantage
    return -weight * objective, np.where(live, -weight * ratio * advantage, 0.0)


def both(logp, old, advantage, weight):
    arrays = [jnp.asarray(x, jnp.float32) for x in (logp, old, advantage, weight)]

    def losses(x):
        return policy_loss(x, *arrays[1:], bounds=BOUNDS)

    loss, backward, stats = jax.vjp(losses, arrays[0], has_aux=True)
    return np.asarray(loss), np.asarray(backward(jnp.ones_like(loss))[0]), np.asarray(stats)


def test_random_tokens_match_the_formula():
    rng = np.random.default_rng(0)
    n = 4096
    old = -rng.exponential(2, n).astype(np.float32)
    logp = (old + rng.normal(scale=1.5, size=n)).astype(np.float32)
    advantage = rng.normal(size=n).astype(np.float32)
    weight = (rng.random(n) < 0.7).astype(np.float32) / n
    loss, gradient, stats = both(logp, old, advantage, weight)
    want_loss, want_gradient = formula(logp, old, advantage, weight)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(gradient, want_gradient, rtol=2e-6, atol=1e-12)
    ratio = np.exp(logp.astype(np.float64) - old)
    asked = weight > 0
    counts = dict(zip(STATS, stats.sum(0), strict=True))
    assert counts["tokens"] == asked.sum()
    assert counts["clipped_high"] == (asked & (advantage > 0) & (ratio > 1 + HIGH)).sum()
    assert counts["clipped_low"] == (asked & (advantage < 0) & (ratio < 1 - LOW)).sum()
    assert counts["clipped_dual"] == (asked & (advantage < 0) & (ratio > DUAL)).sum()
    np.testing.assert_allclose(counts["negative_logp"], -logp[asked].sum(dtype=float), rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # on policy: the gradient is exactly the advantage's
        (1.0, -1.0, 1.0),
        (1.279, 1.0, -1.279),  # just inside the upper bound
        (1.281, 1.0, 0.0),  # just outside
        (0.799, -1.0, 0.0),
        (0.801, -1.0, 0.801),
        (0.5, 1.0, -0.5),  # a ratio may fall freely where the advantage is positive
        (9.99, -1.0, 9.99),
        (10.01, -1.0, 0.0),  # dual clip
        (5.0, 0.0, 0.0),
    ],
)
def test_edges(ratio, advantage, slope):
    loss, gradient, _ = both([np.log(ratio)], [0.0], [advantage], [1.0])
    np.testing.assert_allclose(gradient[0], slope, rtol=1e-6)
    np.testing.assert_allclose(loss, formula([np.log(ratio)], [0], [advantage], [1])[0], rtol=1e-6)


def test_on_policy_gradient_is_exact():
    rng = np.random.default_rng(1)
    logp, advantage = -rng.random(100).astype(np.float32), rng.normal(size=100).astype(np.float32)
    _, gradient, stats = both(logp, logp, advantage, np.ones(100))
    np.testing.assert_array_equal(gradient.view(np.int32), (-advantage).view(np.int32))
    assert stats[:, 1:4].sum() == 0


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("gap", [200.0, -200.0, np.inf, -np.inf])
def test_extreme_ratios_stay_finite(gap, advantage):
    loss, gradient, _ = both([gap], [0.0], [advantage], [1.0])
    assert np.isfinite(loss).all() and np.isfinite(gradient).all()


def test_rows_without_weight_give_exact_zero_whatever_they_hold():
    loss, gradient, stats = both([np.nan, np.inf], [0.0, np.nan], [np.nan, 1.0], [0.0, 0.0])
    for x in (loss, gradient, stats):
        assert (x.view(np.int32) == 0).all()


def test_without_an_older_policy_it_is_maximum_likelihood():
    logp = np.asarray([-1.5, -2.0, -0.1], np.float32)
    _, gradient, stats = both(logp, np.full(3, np.nan), np.ones(3), [0.5, 0.25, 0.0])
    np.testing.assert_array_equal(gradient, [-0.5, -0.25, 0.0])
    counts = dict(zip(STATS, stats.sum(0), strict=True))
    assert (counts["tokens"], counts["negative_logp"], counts["log_ratio"]) == (2, 3.5, 0)


def test_totals_do_not_depend_on_the_mesh():
    policy = Policy()
    terms = jnp.asarray(np.random.default_rng(2).normal(size=(8 * 32, 3)), jnp.float32)
    found = []
    for ranks in (1, 2, 4, 8):
        layout = Layout(data=ranks)

        def total(x, layout=layout):
            return rank_total(token_total(x, policy=policy, layout=layout), layout=layout)

        spec = jax.sharding.PartitionSpec
        run = jax.shard_map(
            total, mesh=layout.mesh(), in_specs=spec("data"), out_specs=spec(), check_vma=False
        )
        found.append(np.asarray(jax.jit(run)(terms)).view(np.int32))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_bounds_are_checked():
    for bad in ({"clip_low": 1.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}):
        with pytest.raises(ValueError, match="clip"):
            PolicyLoss(**bad)
