"""The forward does no float arithmetic outside ops, and the audit would notice if it did."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import cache as caches
from isojax.batch import Bucket, build
from isojax.config_io import load
from isojax.forward import forward, logprobs
from isojax.mesh import Layout
from isojax.models import blocks
from isojax.models.params import parameters
from isojax.numerics.audit import audit, outside_kernels
from isojax.numerics.policy import Policy
from tests.test_invariance import MODELS

POLICY, ONE = Policy(), Layout()
ROOT = Path(__file__).parent.parent


def findings(model, policy=POLICY, audit=audit, piece_rows=64) -> list:
    """The audit of a mixed call (or a decode): forward and log-probabilities."""
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters(model, policy, ONE)
    )
    cache = jax.eval_shape(
        lambda: caches.create(model, policy, ONE, pages=8, slots=4, per_layer=True)
    )
    sequences, pieces = (4, 6) if piece_rows > 1 else (128, 128)
    bucket = Bucket(128, sequences, pieces, pages=4, piece_rows=piece_rows)
    batch = build([], bucket, policy.chunk)

    def call(params, cache, batch, targets, temperature, threshold):
        hidden, cache = forward(params, batch, cache, model=model, policy=policy, layout=ONE)
        out = logprobs(params, hidden, targets, temperature, threshold, policy=policy, layout=ONE)
        return out, cache

    floats = jax.ShapeDtypeStruct((128,), jnp.float32)
    return audit(call, params, cache, batch, np.zeros(128, np.int32), floats, floats)


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_made_of_ops(name):
    assert findings(MODELS[name]) == []


@pytest.mark.parametrize("piece_rows", [1, 64])
def test_the_hopper_forward_is_made_of_kernels(piece_rows):
    config = load(ROOT / "configs" / "qwen3_5_35b_a3b.toml")
    assert config.policy.evaluation == "mosaic"
    found = findings(config.model, config.policy, outside_kernels, piece_rows)
    # the rotary table: no sums, once a call
    assert [f.primitive for f in found] == ["mul", "cos", "sin"]


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
