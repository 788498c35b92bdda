"""The whole run is the same to the last bit on every mesh: rollouts, scores, gradients, weights."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from isojax.contract import cases
from isojax.mesh import MODEL, ROWS, Layout
from isojax.models import blocks
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.trees import pair_sum
from isojax.ops import experts, linear, logprob, norm
from isojax.ops.router import router
from isojax.rl.advantages import group_advantages
from isojax.sampler.config import EngineConfig
from isojax.sampler.engine import Engine
from isojax.sampler.request import Request, inverse_temperature
from isojax.trainer import gradients, sharding
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.packing import Example
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer
from tests import test_trainer
from tests.contract_util import run_config
from tests.test_trainer import BUDGET, VOCAB
from tests.util import bits

# every count of heads divides over eight ranks, and experts combine four by four
COMMON = {**test_trainer.COMMON, "num_attention_heads": 8, "head_dim": 8, "rotary_dim": 4}
MOE = {**test_trainer.MOE, "num_experts_per_tok": 4}
HYBRID = {**test_trainer.HYBRID, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
MODELS = {
    "dense": ModelConfig(model_type="qwen3", **COMMON),
    "moe": ModelConfig(model_type="qwen3_moe", **COMMON, **MOE),
    "hybrid": ModelConfig(model_type="qwen3_5", **COMMON, **HYBRID),
    "hybrid_moe": ModelConfig(
        model_type="qwen3_5_moe",
        **COMMON,
        **MOE,
        **HYBRID,
        shared_expert_intermediate_size=16,
    ),
}
ROUNDED = test_trainer.POLICY
# nothing is rounded to bfloat16, which would hide most faults of a tree
EXACT = dataclasses.replace(ROUNDED, compute_dtype="float32")
POLICIES = {"dense": EXACT, "moe": ROUNDED, "hybrid": ROUNDED, "hybrid_moe": EXACT}
# groups of sequences whose rows ranks share: sequences cross from one rank's rows to the next's
LONG = {"batch_leaves": 2, "context_leaves": 4}
STEPS = 5

SLOW = pytest.mark.slow
FAST_CASES = [("hybrid_moe", "2x2+context2+sequence")]
MESHES = (
    "1x2 2x1 2x2 1x4 4x1 2x4 4x2 1x8 8x1 1x2+sequence 2x2+sequence 2x4+sequence 4x2+sequence "
    "1x8+sequence 1x1+context2 1x1+context4 2x1+context2 2x1+context4 1x2+context2 1x2+context4 "
    "2x2+context2 1x2+context2+sequence 1x2+context4+sequence 2x2+context2+sequence "
    "1x4+context2+sequence"
).split()
CASES = [
    pytest.param(name, mesh, marks=() if (name, mesh) in FAST_CASES else SLOW)
    for name in MODELS
    for mesh in MESHES
]


def examples_of(requests, done, advantages) -> list[Example]:
    """What is scored and trained on, of sampled groups; advantages [requests, samples]."""
    return [
        Example(
            tokens=np.asarray([*request.prompt_ids, *completion.token_ids], np.int32),
            prompt_length=len(request.prompt_ids),
            inverse_temperature=inverse_temperature(request.temperature),
            advantage=float(advantage),
            threshold=completion.thresholds,
        )
        for request, group, row in zip(requests, done, advantages, strict=True)
        for completion, advantage in zip(group, row, strict=True)
    ]


class Life:
    """What a run does, without its files: sample, score, train, and again with the new weights."""

    def __init__(self, name: str, mesh: str, **changed) -> None:
        policy, layout = dataclasses.replace(POLICIES[name], **changed), Layout.parse(mesh)
        self.static = (MODELS[name], policy, layout, layout.mesh())
        self.trainer = Trainer(
            *self.static,
            AdamW(weight_decay=0.1, max_grad_norm=0.5),
            microbatch_tokens=BUDGET,
            remat=False,
            longest=BUDGET,
        )
        self.scorer = Scorer(*self.static, BUDGET, longest=BUDGET)
        self.state = self.trainer.init(init_params(*self.static, seed=0))
        model, policy, layout, mesh = self.static
        self.engine = Engine.create(
            self.state.params, model=model, policy=policy, layout=layout, mesh=mesh,
            config=EngineConfig(
                max_model_len=BUDGET, max_sequences=3, max_batch_tokens=40, bucket_sizes=1
            ),
        )  # fmt: skip

    def step(self, number: int) -> Any:
        """One DAPO step -> all that it computed, but the weights."""
        random = np.random.default_rng(number)
        requests = [
            Request(
                random.integers(0, VOCAB, length).tolist(), 5 + length % 7,
                temperature=0.8, top_p=top_p, n=2, seed=number, ignore_eos=True,
            )
            for length, top_p in ((17, 1.0), (1, 0.9), (33, 1.0), (45, 0.7))
        ]  # fmt: skip
        done = self.engine.generate(requests)
        rewards = np.asarray([[c.token_ids.sum() % 5 for c in group] for group in done])
        advantages = group_advantages(rewards)
        examples = examples_of(requests, done, advantages)
        scored = self.scorer(self.state.params, examples)
        examples = [
            dataclasses.replace(e, old_logp=s.kept) for e, s in zip(examples, scored, strict=True)
        ]
        sampled = [(c.token_ids, c.logprobs, c.thresholds) for group in done for c in group]
        assert_same([s.full for s in scored], [logprobs for _, logprobs, _ in sampled])
        self.state, result = self.trainer.step(
            self.state, examples, PolicyLoss(), Schedule(learning_rate=1e-2)
        )
        self.engine.update_params(self.state.params, number + 1)
        numbers = np.float32([result.loss, result.grad_norm, result.learning_rate])
        return sampled, scored, numbers, result.totals

    def live(self) -> Any:
        steps = [self.step(number) for number in range(STEPS)]
        return steps, jax.tree.map(np.asarray, self.state)


def assert_same(got, want) -> None:
    """Equal as integers: -0.0 is not +0.0."""
    pattern = lambda x: bits(np.asarray(x))  # noqa: E731
    chex.assert_trees_all_equal(jax.tree.map(pattern, got), jax.tree.map(pattern, want))


@functools.cache
def alone(name: str, **changed):
    return Life(name, "1x1", **changed).live()


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_run_is_the_same_on_every_mesh(name, mesh):
    assert_same(Life(name, mesh).live(), alone(name))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("dense", "1x2+context4"),
        pytest.param("hybrid_moe", "1x2+context4", marks=SLOW),
        pytest.param("hybrid_moe", "2x1+context4", marks=SLOW),
        pytest.param("hybrid_moe", "2x2+context2+sequence", marks=SLOW),
        pytest.param("moe", "1x1+context8", marks=SLOW),
    ],
)
def test_sequences_may_cross_from_rank_to_rank(name, mesh):
    assert_same(Life(name, mesh, **LONG).live(), alone(name, **LONG))


def test_a_run_learns_something():
    """So that equal weights say something: all of them move, and rewards differ in some group."""
    steps, state = alone("dense")
    first = jax.tree.map(np.asarray, Life("dense", "1x1").state)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.master, first.master)
    assert all(jax.tree.leaves(moved))
    assert all(numbers[1] > 0 for _, _, numbers, _ in steps)


# --- faults that the tests above must see ---


SWAPPED = np.asarray([0, 2, 1, 3])


def _swapped(partial, layout, dtype):
    """The tree of leaves with two neighbours exchanged: x0 + x2 instead of x0 + x1."""
    return pair_sum(lax.all_gather(partial, MODEL)[SWAPPED]).astype(dtype)


def _plain(partial, layout, dtype):
    return lax.psum(partial, MODEL).astype(dtype)


def _leaf_after_leaf(s, layout):
    """The vocabulary's leaves merged one after the other instead of by neighbours."""
    leaves = [lax.all_gather(x, MODEL, tiled=True) for x in s]
    return functools.reduce(
        logprob._merge, (logprob.Statistics(*(x[i] for x in leaves)) for i in range(8))
    )


def _in_rank_order(x, w, **static):
    """Experts lie on ranks in order: slots sorted by expert combine rank by rank."""
    weights, chosen = router(x, w, **static)
    order = jnp.argsort(chosen, axis=1)
    return tuple(jnp.take_along_axis(a, order, axis=1) for a in (weights, chosen))


def _plain_gradient(partial, *, placement, layout):
    whole = lax.psum(partial, ROWS)
    if placement.axis is None or layout.row_ranks == 1:
        return whole
    size = whole.shape[placement.axis] // layout.row_ranks
    first = lax.axis_index(ROWS) * size
    return lax.dynamic_slice_in_dim(whole, first, size, placement.axis)


FORWARD_FAULTS = {
    "a leaf swapped": ("dense", "1x4", linear, "model_sum", _swapped),
    "psum for the tree": ("dense", "1x4", linear, "model_sum", _plain),
    "vocabulary leaves swapped": (
        "dense", "1x4", logprob, "_finish",
        _leaf_after_leaf,
    ),
    "experts in rank order": ("moe", "2x2", blocks, "router", _in_rank_order),
}  # fmt: skip
BACKWARD_FAULTS = {
    "psum of gradients": ("4x1", gradients, "reduce_gradient", _plain_gradient),
    "ranks of gradients swapped": ("4x1", sharding, "pair_sum", lambda x: pair_sum(x[SWAPPED])),
    "heads before leaves": ("1x4", norm, "head_sum", lambda x, *_: lax.psum(x.sum(0), MODEL)),
}


def _scores(name: str, mesh: str = "1x1"):
    life = Life(name, mesh, compute_dtype="float32")
    random = np.random.default_rng(5)
    examples = [
        Example(random.integers(0, VOCAB, n).astype(np.int32), 1) for n in (64, 40, 23, 64, 17, 50)
    ]
    return [s.full for s in life.scorer(life.state.params, examples)]


_right_scores = functools.cache(_scores)


@pytest.fixture
def planted(monkeypatch):
    """Replace a function of a module; ops traced before or after know nothing of it."""

    def plant(*what):
        jax.clear_caches()
        monkeypatch.setattr(*what)

    yield plant
    jax.clear_caches()


def _differ(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any((bits(np.asarray(x)) != bits(np.asarray(y))).any() for x, y in pairs)


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
def test_a_fault_of_the_forward_is_seen(fault, planted):
    name, mesh, module, function, wrong = FORWARD_FAULTS[fault]
    right = _right_scores(name)
    planted(module, function, wrong)
    assert _differ(_scores(name, mesh), right)


def _trained(mesh: str = "1x1"):
    life = Life("dense", mesh)
    random = np.random.default_rng(6)
    examples = [
        Example(random.integers(0, VOCAB, n).astype(np.int32), 1, advantage=float(n - 40))
        for n in (64, 40, 23, 64, 17, 50, 33, 61)
    ]
    state, result = life.trainer.step(
        life.state, examples, PolicyLoss(), Schedule(learning_rate=1e-2)
    )
    return jax.tree.map(np.asarray, state), result.totals, result.loss, result.grad_norm


_right_training = functools.cache(_trained)


@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_a_fault_of_the_backward_is_seen(fault, planted):
    mesh, module, function, wrong = BACKWARD_FAULTS[fault]
    right = _right_training()
    planted(module, function, wrong)
    assert _differ(_trained(mesh), right)


# --- expert parallelism at its edges ---


@pytest.mark.parametrize(
    ("routing", "mesh"),
    [("all to one", "4x2"), ("never the last four", "2x4+sequence"), ("uneven", "2x2+context2")],
)
def test_no_token_is_lost_however_uneven_the_routing(routing, mesh):
    random = np.random.default_rng(7)
    tokens, k = 64, 2
    x = random.normal(size=(tokens, 16)).astype(jnp.bfloat16)
    weights = random.random((tokens, k)).astype(np.float32)
    chosen = {
        "all to one": np.stack([np.full(tokens, 5), np.full(tokens, 2)], 1),
        "never the last four": np.stack([np.arange(tokens) % 2, 2 + np.arange(tokens) % 2], 1),
        "uneven": np.stack([np.minimum(random.geometric(0.5, tokens), 7), np.zeros(tokens)], 1),
    }[routing].astype(np.int32)
    w = [random.normal(size=(8, *s)).astype(jnp.bfloat16) for s in ((16, 8), (16, 8), (8, 16))]

    def run(mesh: str):
        layout = Layout.parse(mesh)
        row = jax.sharding.PartitionSpec(layout.stream_axes)
        every = jax.sharding.PartitionSpec((*ROWS, MODEL))

        def rank(x, weights, chosen, *w):
            def out(x, weights, *w):
                return experts.experts(x, weights, chosen, *w, policy=ROUNDED, layout=layout)

            y, pull = jax.vjp(out, x, weights, *w)
            return y, pull(jnp.cos(y))

        specs = (row, row, row, every, every, every)
        body = jax.shard_map(
            rank, mesh=layout.mesh(), in_specs=specs, check_vma=False,
            out_specs=(row, (row, row, every, every, every)),
        )  # fmt: skip
        return jax.jit(body)(x, weights, chosen, *w)

    want = run("1x1")
    assert np.asarray(want[0], np.float32).any(axis=1).all()
    assert_same(run(mesh), want)


def test_collectives_move_only():
    """Lowered programs hold no sum over ranks but the trees: all-reduce and its kin are absent."""
    config = run_config(MODELS["hybrid_moe"], policy=ROUNDED)
    layout = Layout.parse("2x2+context2+sequence")
    lowering = cases.Lowering(config, layout, "cpu")
    sizes = cases.probe(ROUNDED, 3, 8)
    for case in (cases.STEP, cases.DECODE):
        for traced in lowering.traced(case, sizes):
            text = traced.lower(lowering_platforms=("cpu",)).as_text()
            assert "all_reduce" not in text and "reduce_scatter" not in text
