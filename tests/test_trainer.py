"""Training: the same bits on every mesh, for every packing of scores, after save and restore."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.policy import Policy
from isojax.trainer.checkpoint import Checkpoints
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.packing import Example
from isojax.trainer.score import Scorer, compare
from isojax.trainer.step import Trainer
from tests.util import assert_same_bits

VOCAB = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 32,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ("sparse",),
}
HYBRID = {
    "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MODELS = {
    "dense": ModelConfig(model_type="qwen3", **COMMON),
    "moe": ModelConfig(model_type="qwen3_moe", **COMMON, **MOE),
    "hybrid_moe": ModelConfig(
        model_type="qwen3_5_moe", **COMMON, **MOE, **HYBRID, shared_expert_intermediate_size=16
    ),
}
POLICY = Policy(chunk=16, kv_block=16, kv_segment=64)
ADAMW = AdamW(weight_decay=0.1, max_grad_norm=0.5)
SCHEDULE = Schedule(learning_rate=1e-2, warmup_steps=2)
BUDGET = 64


def examples(count: int, seed: int) -> list[Example]:
    """Sequences that all packings put two by two into leaves: one program serves every call."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        length = (23, 32)[i % 2]
        prompt = int(rng.integers(1, length))
        found.append(
            Example(
                tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                prompt_length=prompt,
                inverse_temperature=1.25,
                old_logp=None
                if rng.random() < 0.2
                else -rng.exponential(4, length - prompt).astype(np.float32),
                advantage=float(np.float32(rng.normal())),
                weight=float(rng.random() < 0.9),
            )
        )
    return found


@functools.lru_cache
def trainer_of(name: str, mesh: str, remat: bool = False) -> Trainer:
    layout = Layout.parse(mesh)
    return Trainer(
        MODELS[name], POLICY, layout, layout.mesh(), ADAMW, microbatch_tokens=BUDGET, remat=remat
    )


def start(trainer: Trainer):
    return trainer.init(
        init_params(trainer.model, trainer.policy, trainer.layout, trainer.mesh, seed=0)
    )


def train(trainer: Trainer, state, steps: range):
    results = []
    for i in steps:
        state, result = trainer.step(state, examples(32, i), PolicyLoss(), SCHEDULE)
        results.append(result)
    return state, results


def host(state):
    return jax.tree.map(np.asarray, state)


@functools.lru_cache
def reference(name: str):
    state, results = train(trainer_of(name, "1x1"), start(trainer_of(name, "1x1")), range(3))
    return host(state), results


@pytest.mark.parametrize("name", MODELS)
def test_training_moves_the_weights(name):
    state, results = reference(name)
    first = host(start(trainer_of(name, "1x1")))
    assert all(r.grad_norm > 0 and np.isfinite(r.loss) for r in results)
    assert [r.learning_rate for r in results] == pytest.approx([0.005, 0.01, 0.01])
    moved = jax.tree.map(lambda a, b: (a != b).any(), first.master, state.master)
    assert all(jax.tree.leaves(moved))


def test_remat_changes_nothing():
    want, results = reference("hybrid_moe")
    trainer = trainer_of("hybrid_moe", "1x1", remat=True)
    state, found = train(trainer, start(trainer), range(3))
    assert found == results
    assert_same_bits(host(state), want)


def test_scores_do_not_depend_on_packing_or_mesh():
    name = "hybrid_moe"
    trainer = trainer_of(name, "1x1")
    state, data = start(trainer), examples(32, 5)
    fields = (MODELS[name], POLICY)
    want = Scorer(*fields, trainer.layout, trainer.mesh, BUDGET)(state.params, data)
    assert [len(s.full) for s in want] == [e.predicted for e in data]
    assert_same_bits([s.kept for s in want], [s.full for s in want])
    wide = Scorer(*fields, trainer.layout, trainer.mesh, 4 * BUDGET)
    assert_same_bits(wide(state.params, data[::-1])[::-1], want)
    other = trainer_of(name, "2x2")
    scorer = Scorer(*fields, other.layout, other.mesh, BUDGET)
    assert_same_bits(scorer(start(other).params, data), want)


def test_on_policy_step_sees_ratio_one():
    """With the scorer's own log-probabilities as the old ones, no ratio leaves 1."""
    trainer = trainer_of("hybrid_moe", "1x1")
    state, data = start(trainer), examples(32, 6)
    scorer = Scorer(MODELS["hybrid_moe"], POLICY, trainer.layout, trainer.mesh, BUDGET)
    data = [
        dataclasses.replace(example, old_logp=scored.full)
        for example, scored in zip(data, scorer(state.params, data), strict=True)
    ]
    _, result = trainer.step(state, data, PolicyLoss(), SCHEDULE)
    assert result.totals["log_ratio"] == 0.0
    assert result.clip_fraction == 0.0


@pytest.mark.parametrize("name", ["dense", pytest.param("hybrid_moe", marks=pytest.mark.slow)])
def test_resume_on_another_mesh_is_exact(name, tmp_path):
    """Two steps, saved, one more on another mesh: as if never stopped."""
    want, _ = reference(name)
    trainer = trainer_of(name, "2x1")
    state, _ = train(trainer, start(trainer), range(2))
    saved = Checkpoints(tmp_path, trainer)
    saved.save(2, state, {"step": 2, "stream": {"at": 7}})
    saved.close()
    for mesh in ("1x1", "1x2"):
        trainer = trainer_of(name, mesh)
        found = Checkpoints(tmp_path, trainer)
        assert found.latest() == 2
        assert found.position() == {"step": 2, "stream": {"at": 7}}
        state, _ = train(trainer, found.restore(), range(2, 3))
        assert_same_bits(host(state), want)
        found.close()


def test_a_missing_checkpoint_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Checkpoints(tmp_path, trainer_of("dense", "1x1")).restore()


def test_a_gradient_that_is_not_finite_is_said_so():
    trainer = trainer_of("dense", "1x1")
    bad = [dataclasses.replace(e, advantage=float("nan")) for e in examples(4, 1)]
    state, result = trainer.step(start(trainer), bad, PolicyLoss(), SCHEDULE)
    assert not result.finite
    assert_same_bits(host(state), host(start(trainer)))


def test_a_minibatch_without_weight_changes_nothing():
    trainer = trainer_of("dense", "1x1")
    state = start(trainer)
    data = [dataclasses.replace(e, weight=0.0) for e in examples(4, 1)]
    after, result = trainer.step(state, data, PolicyLoss(), SCHEDULE)
    assert after is state and result.tokens == 0


def test_compare():
    a = [np.asarray([-1.0, -2.0], np.float32), np.asarray([-0.5], np.float32)]
    same = compare(a, a, 1.5)
    assert same.exact and same.diff_max == 0.0 and same.tokens == 3 and same.clipped == 0
    b = [a[0] + np.asarray([0.0, 0.5], np.float32), a[1]]
    far = compare(a, b, 1.5)
    assert (far.differing, far.clipped) == (1, 1)
    assert far.diff_max == 0.5 and far.diff_mean == pytest.approx(0.5 / 3)
    zero = compare([np.float32([0.0])], [np.float32([-0.0])], 1.5)
    assert not zero.exact and zero.diff_max == 0.0
    lost = compare([np.float32([np.nan])], [np.float32([-1.0])], 1.5)
    assert lost.diff_max == np.inf and lost.clipped == 1
