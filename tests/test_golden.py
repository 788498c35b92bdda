"""The forward gives the logits of transformers, and its greedy tokens, on every golden checkpoint.

`golden/make_golden.py` made them: random weights, logits of unit scale, float32.
"""

import pathlib

import jax
import numpy as np
import pytest

from isojax import cache as caches
from isojax.batch import Bucket, Segment, build
from isojax.forward import forward, head
from isojax.models import hf
from isojax.numerics.trees import tree_dot
from tests.util import EXACT, ONE

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    tokens, want, greedy = (expected[name] for name in ("tokens", "logits", "greedy"))
    config, params = hf.load(GOLDEN / case, ONE.mesh(), ONE, EXACT)
    count, length = tokens.shape
    pages = -(-(length + greedy.shape[1]) // EXACT.chunk)

    @jax.jit
    def step(params, batch, cache):
        hidden, cache = forward(params, batch, cache, model=config, policy=EXACT, layout=ONE)
        return tree_dot(hidden, head(params)), cache

    def feed(rows, context, bucket):
        segments = [
            Segment(row, context, range(i * pages, (i + 1) * pages), i)
            for i, row in enumerate(np.asarray(rows).tolist())
        ]
        return build(segments, bucket, EXACT.chunk)

    cache = caches.create(config, EXACT, ONE, pages=count * pages, slots=count, per_layer=True)
    whole = Bucket(count * length, count, count * pages, pages, EXACT.chunk)
    logits, cache = step(params, feed(tokens, 0, whole), cache)
    logits = np.asarray(logits).reshape(want.shape)
    assert np.abs(logits - want).max() <= 2e-3

    last = logits[:, -1].argmax(-1)
    continuation = [last]
    one = Bucket(count, count, count, pages, 1)
    for offset in range(greedy.shape[1] - 1):
        logits, cache = step(params, feed(last[:, None], length + offset, one), cache)
        last = np.asarray(logits).argmax(-1)
        continuation.append(last)
    np.testing.assert_array_equal(np.stack(continuation, axis=1), greedy)
