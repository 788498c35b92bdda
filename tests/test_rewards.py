import logging
import sys
import types

import numpy as np
import pytest

from isojax.config import DataConfig
from isojax.rl.data import Prompt
from isojax.rl.rewards import Rewards, rewards_of


def prompt(answer, /, **row):
    return Prompt(0, (1,), "q", answer, row)


def score(config, answer, *responses):
    rewards = rewards_of(config)
    return rewards.score([prompt(answer)] * len(responses), responses).tolist()


def files(**changes):
    return DataConfig(source="jsonl", path="x", **changes)


def test_exact():
    assert score(files(reward="exact"), "4", " 4\n", "4.", "") == [1, 0, 0]


def test_regex_takes_the_last_match():
    config = files(reward="regex", reward_pattern=r"Answer:\s*(-?\d+)")
    assert score(config, "4", "Answer: 3 Answer: 4", "Answer: 4 Answer: 3", "4") == [1, 0, 0]
    whole = files(reward="regex", reward_pattern=r"\d+")
    assert score(whole, "4", "3 then 4") == [1]


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        ("34", "so the sum is\nAnswer: $34$", "\\boxed{35}"),
        ("\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{0.25}"),
        ("8\\sqrt{3}", "it is \\boxed{8 \\sqrt3}", "nothing"),
        ("$-3$", "\\boxed{-3}", "\\boxed{3}"),
    ],
)
def test_math(answer, good, bad):
    pytest.importorskip("math_verify")
    assert score(files(reward="math"), answer, good, bad, "") == [1, 0, 0]


def test_reasoning_gym_scores_by_its_own_rule():
    rewards = rewards_of(DataConfig(task_config={"max_terms": 2}))
    prompts = [prompt("4", question="2 + 2 =", answer="4", metadata={})] * 3
    values = rewards.score(prompts, [" 4 ", "x <answer>4</answer>", "5"])
    assert values[0] == values[1] == 1 and values[2] < 0.1
    assert values.dtype == np.float32 and rewards.failures == 0


def test_own_function(monkeypatch):
    module = types.ModuleType("my_rewards")
    module.length = lambda response, answer, row: len(response) / row["scale"]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    rewards = rewards_of(files(reward="my_rewards:length"))
    assert rewards.score([prompt("a", scale=4)], ["abc"]).tolist() == [0.75]


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such", "math:pi", "nonsense", ":f"])
def test_functions_that_cannot_be_loaded(name):
    with pytest.raises(ValueError, match="data.reward"):
        rewards_of(files(reward=name))


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def f(response, answer, row):\n    return 2")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    assert score(files(reward="rewards_of_mine:f"), "4", "x") == [2]
    del sys.modules["rewards_of_mine"]


def test_bad_pattern():
    with pytest.raises(ValueError, match="reward_pattern"):
        rewards_of(files(reward="regex", reward_pattern="("))


def test_failures_are_counted_logged_and_scored_zero(caplog):
    values = iter([float("nan"), "1", None, float("inf"), True, np.float32(0.5), 1 + 0j])

    def function(response, answer, row):
        if response == "raise":
            raise RuntimeError("boom")
        return next(values)

    rewards = Rewards(function)
    responses = ["raise", *"abcdefg"]
    with caplog.at_level(logging.WARNING):
        got = rewards.score([prompt("x")] * 8, responses)
    assert got.tolist() == [0, 0, 0, 0, 0, 1, 0.5, 0]
    assert rewards.failures == 6
    assert "RuntimeError: boom" in caplog.text and "6 rewards in all" in caplog.text
    assert len(caplog.records) == 4  # three failures and the total
