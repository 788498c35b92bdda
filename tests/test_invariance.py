"""The log-probability of a token has the same bits however its sequence reached the model.

Per model: training call on packed whole sequences, prefill whole, prefill in random pieces,
token-by-token decode, any batch composition and order, after preemption and recompute. Pools are
filled with NaN first.
"""

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isojax import cache as caches
from isojax.batch import Bucket
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.policy import Policy
from tests.runner import Runner, program
from tests.util import assert_same_bits, whole_sequences

COMMON = dict(
    vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    rotary_dim=8, intermediate_size=48,
)  # fmt: skip
MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_layer_types=("sparse",)
)
HYBRID = dict(
    layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
HYBRID_MOE = dict(**MOE, **HYBRID, shared_expert_intermediate_size=16)
MODELS = {
    "qwen3": ModelConfig(model_type="qwen3", num_layers=2, **COMMON),
    "qwen3_moe": ModelConfig(model_type="qwen3_moe", num_layers=2, **COMMON, **MOE),
    "qwen3_next": ModelConfig(model_type="qwen3_next", num_layers=2, **COMMON, **HYBRID_MOE),
    "qwen3_5": ModelConfig(model_type="qwen3_5", num_layers=4, **COMMON, **HYBRID),
    "qwen3_5_moe": ModelConfig(model_type="qwen3_5_moe", num_layers=2, **COMMON, **HYBRID_MOE),
}  # fmt: skip
POLICIES = {"bfloat16": Policy(), "float32": Policy(compute_dtype="float32")}

WHOLE = Bucket(tokens=384, sequences=4, pieces=10, pages=4, piece_rows=64)
MIXED = Bucket(tokens=160, sequences=4, pieces=8, pages=4, piece_rows=64)
DECODE = Bucket(tokens=4, sequences=4, pieces=4, pages=4, piece_rows=1)


@functools.cache
def parameters(name: str, dtype: str):
    layout = Layout()
    return init_params(MODELS[name], POLICIES[dtype], layout, layout.mesh(), seed=0)


def sequences(lengths, seed=0):
    """{name: (tokens, targets)} of random sequences."""
    random = np.random.default_rng(seed)
    made = {}
    for name, length in enumerate(lengths):
        ids = random.integers(0, 96, length + 1).tolist()
        made[name] = (ids[:-1], ids[1:])
    return made


def trained(name, dtype, data):
    """Each sequence's log-probabilities from one training-shaped call: fresh shared cache, all at
    once.
    """
    model, policy = MODELS[name], POLICIES[dtype]
    lengths = [len(tokens) for tokens, _ in data.values()]
    batch = whole_sequences(lengths, tokens=WHOLE.tokens)
    targets = np.zeros(WHOLE.tokens, np.int32)
    row, at = 0, {}
    for key, (tokens, goal) in data.items():
        batch.tokens[row : row + len(tokens)] = tokens
        targets[row : row + len(tokens)] = goal
        at[key] = slice(row, row + len(tokens))
        row += len(tokens)
    cache = caches.create(model, policy, Layout(), pages=16, slots=4, per_layer=False)
    out, _ = program(model, policy)(parameters(name, dtype), batch, cache, targets)
    return {key: np.asarray(out)[rows] for key, rows in at.items()}


def in_pieces(name, dtype, data, plan, seed=0, preempt=()):
    """Feed by `plan`: a list of calls, each {sequence: number of tokens}; all-ones calls use
    decode's bucket.

    preempt: after these calls, drop one sequence's cache; its tokens are fed again from the start.
    """
    runner = Runner(
        MODELS[name], POLICIES[dtype], parameters(name, dtype), pages=32, slots=8, seed=seed
    )
    done = dict.fromkeys(data, 0)
    out = {key: np.zeros(len(tokens), np.float32) for key, (tokens, _) in data.items()}

    def feed(call):
        pieces = []
        for key, count in call.items():
            tokens, goal = (x[done[key] : done[key] + count] for x in data[key])
            pieces.append((key, tokens, goal))
        single = all(count == 1 for count in call.values())
        for key, value in runner.feed(pieces, DECODE if single else MIXED).items():
            out[key][done[key] : done[key] + len(value)] = value
            done[key] += len(value)

    for number, call in enumerate(plan):
        feed(call)
        if number in preempt:
            victim = sorted(call)[0]
            again = done[victim]
            runner.drop(victim)
            done[victim] = 0
            while done[victim] < again:
                feed({victim: min(MIXED.tokens, again - done[victim])})
    assert all(done[key] == len(data[key][0]) for key in data)
    return out


def random_plan(lengths, random, decode=False):
    """Calls that feed everything in random pieces, mixes and orders."""
    left = dict(enumerate(lengths))
    plan = []
    while left:
        keys = random.permutation(list(left))[: random.integers(1, 5)]
        call, room = {}, MIXED.tokens
        for key in keys:
            most = min(left[key], room, 1 if decode or random.random() < 0.3 else 130)
            if most:
                count = int(random.integers(1, most + 1))
                call[int(key)] = count
                room -= count
                left[key] -= count
        left = {key: n for key, n in left.items() if n}
        plan.append(call)
    return plan


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, "bfloat16", marks=pytest.mark.slow)
            if name in ("qwen3_next", "qwen3_5")  # the blocks of qwen3_5_moe
            else (name, "bfloat16")
            for name in MODELS
        ),
        pytest.param("qwen3_5_moe", "float32", marks=pytest.mark.slow),
    ],
)
def test_training_equals_prefill_pieces_and_decode(name, dtype):
    lengths = (130, 64, 65, 1)
    data = sequences(lengths)
    want = trained(name, dtype, data)
    alone = [{key: n} for key, n in enumerate(lengths)]
    assert_same_bits(in_pieces(name, dtype, data, alone), want)
    random = np.random.default_rng(1)
    plan = random_plan(lengths, random)
    assert_same_bits(in_pieces(name, dtype, data, plan, seed=2, preempt={1, 3}), want)
    step_by_step = [{key: 1 for key, n in enumerate(lengths) if t < n} for t in range(max(lengths))]
    assert_same_bits(in_pieces(name, dtype, data, step_by_step, seed=3), want)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 63, 64, 65, 100]), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_any_split_and_order(lengths, seed):
    name = "qwen3_5_moe"
    random = np.random.default_rng(seed)
    data = sequences(lengths, seed)
    want = trained(name, "bfloat16", data)
    got = in_pieces(name, "bfloat16", data, random_plan(lengths, random), seed=seed, preempt={0})
    assert_same_bits(got, want)


def test_order_and_company_do_not_matter():
    data = sequences((100, 30, 70))
    want = trained("qwen3_5_moe", "bfloat16", data)
    for order in ([2, 0, 1], [1], [0, 2]):
        some = {key: data[key] for key in order}
        assert_same_bits(trained("qwen3_5_moe", "bfloat16", some), {k: want[k] for k in order})
