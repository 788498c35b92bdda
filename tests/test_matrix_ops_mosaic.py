"""Linear maps, experts and log-probabilities in their Hopper evaluation: interpreted, against the
reference evaluation; lowered at the 35B shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.ops.experts import experts
from isojax.ops.linear import columns, rows, stream_linear
from isojax.ops.logprob import linear_logprob, logits_logprob, scaled_logits
from tests.kernels import BF16, F32, I32, error, f64, interpreted, normal

ONE = Layout()
SMALL = {"leaves": 2, "batch_leaves": 2, "vocab_leaves": 2}
REFERENCE, MOSAIC = Policy(**SMALL), Policy(evaluation="mosaic", **SMALL)
T = 12


def with_gradient(function, *arguments):
    """Results, and gradients of their sum after a cosine."""
    out, pull = jax.vjp(function, *arguments)
    return out, pull(jax.tree.map(jnp.cos, out))


def both(function, *arguments):
    """Of `function(policy, *arguments)`: the kernels' results and the reference's, flat."""
    want = with_gradient(functools.partial(function, REFERENCE), *arguments)
    with interpreted():
        got = with_gradient(functools.partial(function, MOSAIC), *arguments)
    return list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def close(pairs, bound=6e-3):
    for got, want in pairs:
        assert got.dtype == want.dtype
        assert error(got, f64(want)) < bound


def test_linear_maps():
    def maps(policy, x, wide, narrow, back, one):
        options = {"policy": policy, "layout": ONE}
        a, b = columns(x, (wide, narrow), **options)
        return rows(a, back, **options), b, stream_linear(x, one, **options)

    w = [normal(i, *s) for i, s in enumerate([(64, 128), (64, 8), (128, 64), (64, 1)], 1)]
    close(both(maps, normal(0, T, 64), *w))


def routed(seed=0, tokens=T):
    random = np.random.default_rng(seed)
    chosen = np.argsort(random.random((tokens, 4)), axis=1)[:, :2]
    weights = random.random((tokens, 2))
    w = [normal(i, 4, *s) * 0.3 for i, s in enumerate([(128, 64), (128, 64), (64, 128)], 1)]
    x = normal(0, tokens, 128)
    return x, jnp.asarray(weights, F32), jnp.asarray(chosen, I32), *w


def test_experts():
    x, weights, chosen, *w = routed()

    def mixture(policy, x, weights, *w):
        return experts(x, weights, chosen, *w, policy=policy, layout=ONE)

    close(both(mixture, x, weights, *w))


def test_logprobs():
    v = 640  # leaves of 320: a second block of 64
    x, head = normal(0, T, 64), normal(1, 64, v)
    random = np.random.default_rng(2)
    targets = jnp.asarray(random.integers(0, v, T), I32)
    inverse = jnp.asarray(random.uniform(0.5, 2, T), F32)
    threshold = jnp.where(jnp.arange(T) % 2 == 0, 0.0, -jnp.inf)

    def op(policy, x, head):
        rest = (targets, inverse, threshold)
        return linear_logprob(x, head, *rest, policy=policy, layout=ONE)

    close(both(op, x, head), 1e-2)
    with interpreted():
        whole = op(MOSAIC, x, head)
        z = scaled_logits(x[:3], head, inverse[:3], policy=MOSAIC, layout=ONE)
        decoded = logits_logprob(z, targets[:3], threshold[:3], policy=MOSAIC)
    # a CPU's product has other bits for three rows; the GPU's are compared in `bench_kernels.py`
    for got, want in zip(decoded, whole, strict=True):
        assert error(got, f64(want[:3])) < 1e-5


@pytest.mark.parametrize(("changed", "vocabulary"), [({"vocab_block": 512}, 512), ({}, 520)])
def test_what_the_kernels_ask_of_the_vocabulary(changed, vocabulary):
    policy = Policy(evaluation="mosaic", **changed)
    with pytest.raises(ValueError, match="vocabulary"):
        logits_logprob(jnp.zeros((1, vocabulary)), jnp.zeros(1, I32), jnp.zeros(1), policy=policy)


H, TOKENS, VOCABULARY = 2048, 10240, 248320
FULL = Policy(evaluation="mosaic")
FULL_OPTIONS = {"policy": FULL, "layout": ONE}


def shape(*s, dtype=BF16):
    return jax.ShapeDtypeStruct(s, dtype)


CASES = {
    "columns": (
        lambda x, *w: columns(x, w, **FULL_OPTIONS),
        [shape(TOKENS, H)],
        [shape(H, n) for n in (2048, 2048, 4096, 4096, 32, 32)],
    ),
    "rows": (
        lambda x, w: rows(x, w, **FULL_OPTIONS), [shape(TOKENS, 4096)], [shape(4096, H)],
    ),
    "stream": (
        lambda x, w: stream_linear(x, w, **FULL_OPTIONS), [shape(TOKENS, H)], [shape(H, 1)],
    ),
    "experts": (
        lambda x, weights, chosen, *w: experts(x, weights, chosen, *w, **FULL_OPTIONS),
        [shape(TOKENS, H), shape(TOKENS, 8, dtype=F32), shape(TOKENS, 8, dtype=I32)],
        [shape(256, H, 512), shape(256, H, 512), shape(256, 512, H)],
    ),
    "logprob": (
        lambda x, i, t, h, w: linear_logprob(x, w, i, t, h, **FULL_OPTIONS),
        [shape(TOKENS, H), shape(TOKENS, dtype=I32), *[shape(TOKENS, dtype=F32)] * 2],
        [shape(H, VOCABULARY)],
    ),
}  # fmt: skip


LONG = ("experts", "logprob")  # the committed contract of the 35B model lowers them too


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in LONG else ()) for c in CASES]
)
def test_lowers_at_the_35b_shapes(case):
    function, inputs, weights = CASES[case]

    def gradient(x, rest, weights):
        out, pull = jax.vjp(lambda x, *w: function(x, *rest, *w), x, *weights)
        return out, pull(out)

    traced = jax.jit(gradient).trace(inputs[0], inputs[1:], weights)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "dot_general" not in text
