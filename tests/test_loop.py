"""The main job, small: exact at every step, and resumed as if it had never stopped."""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest

from isojax.config import RunConfig
from isojax.config_io import build
from isojax.contract.canonical import ContractError
from isojax.numerics.policy import Policy
from isojax.report.metrics import REQUIRED, read_metrics
from isojax.rl import dapo, loop
from isojax.rl.loop import DisagreementError, Run
from isojax.trainer.optimizer import Schedule
from tests.util import assert_same_bits

SETTINGS = {
    "steps": 3,
    "model": {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rotary_dim": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "eos_token_ids": [2],
    },
    "sampler": {
        "max_tokens": 4,
        "max_sequences": 16,
        "max_batch_tokens": 128,
        "bucket_sizes": 1,
        "top_k": 40,
    },
    "trainer": {
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "minibatch_prompts": 2,
        "microbatch_tokens": 64,
        "remat": False,
    },
    "warm_start": {"steps": 2, "prompts": 16, "learning_rate": 1e-2},
    "algorithm": {"prompts_per_step": 4, "samples_per_prompt": 4, "overlong_buffer": 2,
                  "max_sampling_rounds": 2},
    "data": {
        "task_config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "max_prompt_tokens": 48,
        "reward": "tests.test_loop:by_length",
    },
    "report": {"progress": False, "plot_every": 0},
}  # fmt: skip


def by_length(response: str, answer: str, row) -> float:
    """A reward that an untrained model can tell apart."""
    return float(len(response) % 3)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def config(runs_dir, name: str, **changes) -> RunConfig:
    made = build(RunConfig, {**SETTINGS, "runs_dir": str(runs_dir), "name": name})
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def whole(runs_dir):
    """A run that nothing interrupted."""
    run = Run(config(runs_dir, "whole"))
    run.run()
    return run


def saved(run: Run):
    return jax.tree.map(np.asarray, (run.state.params, run.state.master, run.state.optimizer))


def steps_of(run: Run) -> list[dict]:
    rows = read_metrics(run.config.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time_")} for row in rows]


def test_every_step_is_exact_and_recorded(whole):
    rows = read_metrics(whole.config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert set(REQUIRED) <= set(row)
        assert row["logp_diff_max"] == row["logp_differing_tokens"] == 0
        assert row["mismatch_clipped_tokens"] == 0
        assert row["contract_digest"] == whole.contract.numerical
        assert row["grad_norm"] > 0
    folder = whole.config.folder
    assert {"config.toml", "contract.json", "checkpoints", "plots"} <= {
        path.name for path in folder.iterdir()
    }
    assert json.loads((folder / "contract.json").read_text())["evidence"]


def test_the_first_minibatch_is_on_policy_also_where_sampling_is_cut(runs_dir, whole):
    """top_k = 40 of 512: ratios over the kept set are exactly 1 before the first update."""
    run = Run(config(runs_dir, "whole"), resume=True)
    rollouts = dapo.collect(
        run.stream, run.engine.generate, run.rewards, run.tokenizer,
        run.config.algorithm, run.config.sampler, run.config.seed,
    )  # fmt: skip
    examples = dapo.examples_of(rollouts.groups, run.config.algorithm, run.config.sampler)
    assert all(np.isfinite(example.threshold).all() for example in examples)
    scored = run.scorer(run.state.params, examples)
    assert any((own.full != own.kept).any() for own in scored)
    examples = [
        dataclasses.replace(example, old_logp=own.kept)
        for example, own in zip(examples, scored, strict=True)
    ]
    _, result = run.trainer.step(run.state, examples, run.loss, Schedule(1e-3))
    assert result.totals["log_ratio"] == 0.0 and result.clip_fraction == 0.0


def test_interrupted_and_resumed_is_uninterrupted(runs_dir, whole, monkeypatch):
    """Stopped in the warm start, amid sampling, and by a signal that comes during an update."""
    settings = config(runs_dir, "stopped")
    train, collect = Run._train, dapo.collect
    calls = iter(range(100))  # train, train, collect, train, collect, collect, ...

    def train_then_signal(self, *arguments):
        found = train(self, *arguments)
        if next(calls) in (0, 3):
            signal.raise_signal(signal.SIGINT)
        return found

    def collect_then_signal(*arguments):
        found = collect(*arguments)
        if next(calls) == 4:
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(Run, "_train", train_then_signal)
    monkeypatch.setattr(loop.dapo, "collect", collect_then_signal)
    positions = []
    run = Run(settings)
    for _ in range(10):
        try:
            run.run()
            break
        except KeyboardInterrupt:
            positions.append((run.position.warm, run.position.step))
            run = Run(settings, resume=True)
    assert positions == [(1, 0), (2, 1), (2, 1)]
    assert steps_of(run) == steps_of(whole)
    assert_same_bits(saved(run), saved(whole))


def test_a_finished_run_is_not_overwritten(runs_dir, whole):
    with pytest.raises(FileExistsError, match="--resume"):
        Run(config(runs_dir, "whole"))


def test_nothing_to_resume_is_said_so(runs_dir):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Run(config(runs_dir, "none"), resume=True)


def test_resuming_under_another_contract_needs_consent(runs_dir, whole, capsys):
    moved = config(runs_dir, "whole", policy=Policy(kv_segment=2048))
    with pytest.raises(ContractError, match=r"policy\.kv_segment: 4096 -> 2048"):
        Run(moved, resume=True)
    run = Run(moved, resume=True, accept_contract_change=True)
    assert "policy.kv_segment: 4096 -> 2048" in capsys.readouterr().err
    assert run.position == whole.position and run.contract.numerical != whole.contract.numerical


def test_a_difference_of_one_bit_stops_the_run(runs_dir, whole, monkeypatch):
    collect = dapo.collect

    def collect_and_spoil(*arguments):
        found = collect(*arguments)
        logprobs = found.groups[0].completions[0].logprobs
        logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
        return found

    monkeypatch.setattr(loop.dapo, "collect", collect_and_spoil)
    longer = config(runs_dir, "whole", steps=4)
    run = Run(longer, resume=True)
    before = saved(run)
    with pytest.raises(DisagreementError, match="1 of .* log-probabilities differ"):
        run.run()
    assert_same_bits(saved(run), before)
    warns = dataclasses.replace(
        longer, contract=dataclasses.replace(longer.contract, on_difference="warn")
    )
    run = Run(warns, resume=True)
    run.run()
    assert steps_of(run)[-1]["logp_differing_tokens"] == 1
    assert steps_of(run)[-1]["logp_diff_max"] > 0


def test_rollouts_of_other_weights_are_refused(runs_dir, whole, monkeypatch):
    run = Run(config(runs_dir, "whole", steps=9), resume=True)
    run.engine.update_params(run.state.params, version=77)
    with pytest.raises(ContractError, match="weights of version 77"):
        run.run()
