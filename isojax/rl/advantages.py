"""Group-relative advantages, dynamic sampling and the treatment of overlong responses, in NumPy.

The formulas are DAPO's (Yu et al., 2025, arXiv:2503.14476).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: np.ndarray, *, normalize_by_std: bool = True) -> np.ndarray:
    """Rewards [P, n] of n responses to each of P prompts -> advantages float32 [P, n].

    A = (R - mean(R)) / std(R) within a group (eq. 9), std with n - 1 in its denominator; without
    `normalize_by_std` only centred (Dr. GRPO, Liu et al., 2025, arXiv:2503.20783). Computed in
    float64. A group whose rewards are all alike has advantages of exactly 0.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if normalize_by_std:
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        centred = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)
    return np.where(has_variance(rewards)[:, None], centred, 0.0).astype(np.float32)


def has_variance(rewards: np.ndarray) -> np.ndarray:
    """Which groups of rewards [P, n] hold two different ones, bool [P]: dynamic sampling keeps
    these (eq. 11).

    To be asked of the task's rewards, before length penalties: a group that is right throughout
    teaches nothing, however long its responses are.
    """
    return rewards.max(axis=1) > rewards.min(axis=1)


def overlong_penalties(
    lengths: np.ndarray, *, max_tokens: int, buffer: int, penalty: float = 1.0
) -> np.ndarray:
    """Soft punishment of long responses, float32, to be added to rewards (eq. 13).

    lengths: tokens of each response, any shape. 0 up to max_tokens - buffer; then falling linearly
    to -penalty at max_tokens, and -penalty beyond. A buffer of 0 punishes only what lies beyond.
    """
    over = np.asarray(lengths, np.float64) - (max_tokens - buffer)
    share = np.clip(over / buffer, 0, 1) if buffer else (over > 0)
    return (-penalty * share + 0.0).astype(np.float32)  # + 0.0: no negative zeros


def contributes(truncated: np.ndarray, *, overlong_filter: bool) -> np.ndarray:
    """Which responses enter the loss, bool: with the filter, not those cut off at the limit."""
    truncated = np.asarray(truncated, bool)
    return ~truncated if overlong_filter else np.ones_like(truncated)


@dataclasses.dataclass
class DynamicBatch[T]:
    """Fills a rollout batch with groups that teach something, round after round.

    size: groups of a full batch. max_rounds: rounds of sampling after which the batch is filled up
    with groups of no variance, whose advantages are 0. keep_all: take every group (no dynamic
    sampling).

    rounds: rounds so far. flat: groups of no variance so far. surplus: groups that came after the
    batch was full.
    """

    size: int
    max_rounds: int
    keep_all: bool = False
    rounds: int = 0
    flat: int = 0
    surplus: int = 0

    def __post_init__(self) -> None:
        self._kept: list[T] = []
        self._spare: list[T] = []

    def add(self, groups: Sequence[T], rewards: np.ndarray) -> None:
        """Offer one round: groups and their rewards [len(groups), n]."""
        self.rounds += 1
        for group, teaches in zip(groups, has_variance(rewards), strict=True):
            if not (teaches or self.keep_all):
                self.flat += 1
                if len(self._spare) < self.size:
                    self._spare.append(group)
            elif len(self._kept) < self.size:
                self._kept.append(group)
            else:
                self.surplus += 1

    @property
    def missing(self) -> int:
        """Groups that another round should bring; 0 when the batch is done."""
        if self.rounds >= self.max_rounds and len(self._kept) + self.flat >= self.size:
            return 0
        return self.size - len(self._kept)

    @property
    def dropped(self) -> int:
        """Groups of no variance that do not take part; of a full batch some may fill it up."""
        return self.flat - (0 if self.missing else self.size - len(self._kept))

    def take(self) -> list[T]:
        """The full batch, in the order of arrival; groups that fill it up come last."""
        if self.missing:
            raise RuntimeError(f"{self.missing} of {self.size} groups are missing")
        return self._kept + self._spare[: self.size - len(self._kept)]
