"""The forward does no float arithmetic outside ops, and the audit would notice if it did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import cache as caches
from isojax.batch import Bucket, build
from isojax.forward import forward, logprobs
from isojax.mesh import Layout
from isojax.models import blocks
from isojax.models.params import parameters
from isojax.numerics.audit import audit
from isojax.numerics.policy import Policy
from tests.test_invariance import MODELS

POLICY, ONE = Policy(), Layout()


def findings(model) -> list:
    """The audit of a mixed call: forward and log-probabilities."""
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters(model, POLICY, ONE)
    )
    cache = jax.eval_shape(
        lambda: caches.create(model, POLICY, ONE, pages=8, slots=4, per_layer=True)
    )
    bucket = Bucket(tokens=128, sequences=4, pieces=6, pages=4, piece_rows=64)
    batch = build([], bucket, POLICY.chunk)

    def call(params, cache, batch, targets, temperature, threshold):
        hidden, cache = forward(params, batch, cache, model=model, policy=POLICY, layout=ONE)
        out = logprobs(params, hidden, targets, temperature, threshold, policy=POLICY, layout=ONE)
        return out, cache

    floats = jax.ShapeDtypeStruct((128,), jnp.float32)
    return audit(call, params, cache, batch, np.zeros(128, np.int32), floats, floats)


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_made_of_ops(name):
    assert findings(MODELS[name]) == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda x: x * 2,
        lambda x: x + jnp.mean(x),
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x), x),
    ],
)
def test_a_planted_violation_is_found(plant, monkeypatch):
    mlp = blocks.mlp
    monkeypatch.setattr("isojax.forward.mlp", lambda *args: plant(mlp(*args)))
    found = findings(MODELS["qwen3"])
    assert found and all("test_audit.py" in str(f) for f in found)
