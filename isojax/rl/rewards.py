"""Rewards: how good a response is, as one number. A scorer that fails costs a zero, not the run."""

import importlib
import logging
import math
import numbers
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isojax import distributed
from isojax.config import DataConfig
from isojax.rl.data import Prompt, reasoning_gym_task

log = logging.getLogger(__name__)

# response, right answer, row of the data -> reward
RewardFunction = Callable[[str, str, Mapping[str, Any]], float]

_LOGGED_PER_CALL = 3
_MATH_TIMEOUT_S = 5  # of parsing or comparing one answer


class Rewards:
    """Scores responses with one function.

    failures: calls so far that raised, or gave NaN, an infinity or no number; each scored 0.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self.failures = 0

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Rewards float32 [N] of responses to prompts.

        Of several processes only the first one calls the function, which may well answer otherwise
        elsewhere (a time limit, a random choice); the others take its word.
        """

        def scored() -> dict[str, Any]:
            pairs = zip(prompts, responses, strict=True)
            before = self.failures
            rewards = [self._one(*pair, before) for pair in pairs]
            if self.failures - before > _LOGGED_PER_CALL:
                log.warning("%d rewards in all failed in this batch", self.failures - before)
            return {"rewards": rewards, "failures": self.failures}

        found = distributed.share(scored)
        self.failures = found["failures"]
        return np.asarray(found["rewards"], np.float32)

    def _one(self, prompt: Prompt, response: str, before: int) -> float:
        try:
            value: Any = self._function(response, prompt.answer, prompt.row)
            if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
                return float(value)
            problem = f"{value!r} is not a finite number"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.failures += 1
        if self.failures - before <= _LOGGED_PER_CALL:
            log.warning("the reward of prompt %d failed, scored 0: %s", prompt.index, problem)
        return 0.0


def rewards_of(config: DataConfig) -> Rewards:
    """The rewards that a configuration names.

    Raises:
      ValueError: unknown name, bad pattern, or a module:function that cannot be loaded.
      ImportError: a package of the `data` extra is missing.
    """
    return Rewards(reward_function(config))


def reward_function(config: DataConfig) -> RewardFunction:
    """The function behind `rewards_of`."""
    if config.reward == "reasoning_gym":
        return _reasoning_gym(config)
    if config.reward == "math":
        return _math()
    if config.reward == "exact":
        return exact
    if config.reward == "regex":
        return _regex(config.reward_pattern)
    if ":" in config.reward:
        return _load(config.reward)
    raise ValueError(
        f"data.reward {config.reward!r} is not reasoning_gym, math, exact, regex or module:function"
    )


def exact(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 if the response is the answer, white space around them aside."""
    return float(response.strip() == answer.strip())


def _regex(pattern: str) -> RewardFunction:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"data.reward_pattern {pattern!r}: {error}") from None

    def score(response: str, answer: str, row: Mapping[str, Any]) -> float:
        """1 if the last match of the pattern is the answer."""
        matches = list(compiled.finditer(response))
        if not matches:
            return 0.0
        found = matches[-1][1 if compiled.groups else 0] or ""
        return float(found.strip() == answer.strip())

    return score


def _math() -> RewardFunction:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError('data.reward = "math" needs: pip install "isojax[data]"') from error

    def score(response: str, answer: str, row: Mapping[str, Any]) -> float:
        """1 if math-verify finds the response's final answer equal to the right one."""
        # its time limit is an alarm signal, which only the main thread can take
        main = threading.current_thread() is threading.main_thread()
        limit = _MATH_TIMEOUT_S if main else None
        target = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        gold = math_verify.parse(target, parsing_timeout=limit)
        if not gold:
            raise ValueError(f"the right answer {answer!r} cannot be parsed")
        found = math_verify.parse(response, parsing_timeout=limit)
        return float(math_verify.verify(gold, found, timeout_seconds=limit))

    return score


def _reasoning_gym(config: DataConfig) -> RewardFunction:
    task = reasoning_gym_task(config.task, config.task_config)
    from reasoning_gym.utils import extract_answer

    def score(response: str, answer: str, row: Mapping[str, Any]) -> float:
        """The task's own score of what stands in <answer> tags, or of all without them."""
        tagged = extract_answer(response)
        return task.score_answer(response.strip() if tagged is None else tagged, row)

    return score


def _load(name: str) -> RewardFunction:
    """A function of a module that is installed or lies in the working directory."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # for good: the module may import its neighbours when it is called
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"data.reward {name!r}: {error}") from None
    if not callable(function):
        raise ValueError(f"data.reward {name!r} is not a function")
    return function
