"""The engine with real models: it returns what the trainer's call computes, bit for bit, and its
sizes, the mesh and the company of a request move no sample."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import cache as caches
from isojax.forward import forward, logprobs
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.audit import audit
from isojax.numerics.policy import Policy
from isojax.sampler.config import EngineConfig, buckets
from isojax.sampler.engine import Engine
from isojax.sampler.executor import rank_step
from isojax.sampler.inputs import pack, shape_of
from isojax.sampler.request import Request, inverse_temperature
from tests.util import assert_same_bits, whole_sequences

VOCAB = 96
MODEL = ModelConfig(
    model_type="qwen3_5_moe", num_layers=2, vocab_size=VOCAB, hidden_size=32,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_layer_types=("sparse",),
    layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip
DENSE = ModelConfig(
    model_type="qwen3", num_layers=2, vocab_size=VOCAB, hidden_size=32, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rotary_dim=8, intermediate_size=48,
    tie_word_embeddings=True,
)  # fmt: skip
POLICY, ONE = Policy(), Layout()
SIZES = dict(max_model_len=192, max_sequences=4, max_batch_tokens=260, bucket_sizes=1)


@functools.cache
def parameters(model, layout, seed=0):
    return init_params(model, POLICY, layout, layout.mesh(), seed=seed)


@functools.cache
def engine(model, layout=ONE, **sizes):
    """Shared by the tests, because its programs take seconds to compile."""
    return Engine.create(
        parameters(model, layout), model=model, policy=POLICY, layout=layout, mesh=layout.mesh(),
        config=EngineConfig(**{**SIZES, **sizes}), contract_digest="c",
    )  # fmt: skip


def prompt(length, seed=0):
    return np.random.default_rng((seed, length)).integers(0, VOCAB, length).tolist()


REQUESTS = [
    Request(prompt(64), 6, seed=1),
    Request(prompt(70), 9, temperature=0.7, top_p=0.8, n=3, seed=2),
    Request(prompt(1), 70, temperature=1.3, top_k=11, seed=3),
    Request(prompt(130), 5, temperature=0, n=2),
    Request(prompt(63), 3, min_p=0.05, top_p=0.95, top_k=50, temperature=0.5, seed=2**63, n=2),
]


@functools.cache
def reference(model):
    return engine(model).generate(REQUESTS)


def arrays(done):
    return [(c.token_ids, c.logprobs, c.thresholds) for group in done for c in group]


def trained(model, request, completion):
    """The trainer's log-probabilities of a response, full and kept, and its kept logits' count."""
    ids = [*request.prompt_ids, *completion.token_ids.tolist()]
    batch = whole_sequences([len(ids) - 1], tokens=256)
    batch.tokens[: len(ids) - 1] = ids[:-1]
    at = slice(len(request.prompt_ids) - 1, len(ids) - 1)
    targets, threshold = np.zeros(256, np.int32), np.full(256, -np.inf, np.float32)
    targets[: len(ids) - 1], threshold[at] = ids[1:], completion.thresholds
    inverse = np.full(256, inverse_temperature(request.temperature), np.float32)
    full, kept = trainer(model)(parameters(model, ONE), batch, targets, inverse, threshold)
    return np.asarray(full)[at], np.asarray(kept)[at]


@functools.cache
def trainer(model):
    layout = ONE

    @jax.jit
    def call(params, batch, targets, inverse, threshold):
        static = {"policy": POLICY, "layout": layout}
        cache = caches.create(model, POLICY, layout, pages=4, slots=1, per_layer=False)
        hidden, _ = forward(params, batch, cache, model=model, **static)
        return logprobs(params, hidden, targets, inverse, threshold, **static)

    return call


@pytest.mark.parametrize("model", [MODEL, DENSE], ids=lambda m: m.model_type)
def test_logprobs_are_the_trainers(model):
    for request, group in zip(REQUESTS, reference(model), strict=True):
        for completion in group:
            assert completion.finish_reason == "length" and completion.contract_digest == "c"
            full, kept = trained(model, request, completion)
            assert_same_bits(full, completion.logprobs)
            assert (kept >= full).all() and (kept <= 0).all()
            cut = np.isfinite(completion.thresholds)
            assert (kept[cut] > full[cut]).all()
            assert_same_bits(kept[~cut], full[~cut])
    assert np.isfinite(reference(model)[1][0].thresholds).any()


@pytest.mark.parametrize(
    "model, sizes",
    [
        # preempts; prompts in pieces
        (MODEL, dict(max_sequences=3, pages=4, max_batch_tokens=70)),
        # one at a time, no shared prompts
        pytest.param(MODEL, dict(max_sequences=1, max_batch_tokens=65), marks=pytest.mark.slow),
        (DENSE, dict(max_sequences=8, max_batch_tokens=600, bucket_sizes=2)),
    ],
    ids=["tight", "alone", "roomy"],
)
def test_sizes_do_not_matter(model, sizes):
    made = engine(model, **sizes)
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 1, 0]):
        done = made.generate([REQUESTS[i] for i in order])
        assert_same_bits(arrays(done), arrays([reference(model)[i] for i in order]))
    assert (made.counts.preemptions > 0) == ("pages" in sizes)


def test_nothing_compiles_in_steady_state():
    reference(MODEL)
    made = engine(MODEL)
    compiles = made.counts.compiles
    assert compiles == 4  # decode, mixed, copy, and what hands tokens from call to call
    for shift in range(3):
        made.generate([Request(prompt(20 + shift, shift), 4 + shift, n=1 + shift)])
    made.release_cache()
    done = made.generate(REQUESTS)
    assert made.counts.compiles == compiles
    assert_same_bits(arrays(done), arrays(reference(MODEL)))


def test_weights_are_held_by_reference_and_replaced():
    made = engine(MODEL)
    assert made._executor.params is parameters(MODEL, ONE)
    before = made.generate(REQUESTS[:2])
    made.update_params(parameters(MODEL, ONE, seed=1), 7)
    other = made.generate(REQUESTS[:2])
    assert other[0][0].weights_version == 7
    assert any((a.token_ids != b.token_ids).any() for a, b in zip(before[1], other[1], strict=True))
    made.update_params(parameters(MODEL, ONE), 0)
    assert_same_bits(arrays(made.generate(REQUESTS[:2])), arrays(before))


@pytest.mark.slow
def test_the_mesh_does_not_matter():
    done = engine(MODEL, layout=Layout(2, 2)).generate(REQUESTS)
    assert_same_bits(arrays(done), arrays(reference(MODEL)))


def test_an_interrupted_call_leaves_a_working_engine():
    made = engine(MODEL)
    stream = made.stream(REQUESTS)
    next(stream)
    for leaf in jax.tree.leaves(
        made._executor.cache
    ):  # as if a call took the cache and never ended
        leaf.delete()
    stream.close()
    assert_same_bits(arrays(made.generate(REQUESTS)), arrays(reference(MODEL)))


def test_logits_that_are_not_finite_are_an_error():
    made = engine(MODEL)
    params = dict(parameters(MODEL, ONE))
    params["embed"] = params["embed"].at[5].set(jnp.nan)
    made.update_params(params, 1)
    bad, good = made.generate([Request([1, 2, 5], 4), Request([1, 2, 3], 1, seed=4)])
    assert bad[0].finish_reason == "error" and "not finite" in bad[0].error
    assert good[0].finish_reason == "length"
    made.update_params(parameters(MODEL, ONE), 0)


def test_a_step_has_no_arithmetic_outside_ops():
    config = EngineConfig(**SIZES)
    cache = caches.create(MODEL, POLICY, ONE, pages=8, slots=4, per_layer=True)
    for bucket in buckets(config, POLICY.chunk):
        found = audit(
            rank_step, parameters(MODEL, ONE), cache, pack([shape_of(bucket)]),
            model=MODEL, policy=POLICY, layout=ONE, bucket=bucket,
        )  # fmt: skip
        assert not found, "\n".join(map(str, found))
