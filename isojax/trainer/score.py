"""The trainer's log-probabilities of whole sequences, and how they compare with the rollout's."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.params import specs
from isojax.numerics.policy import Policy
from isojax.trainer.call import ROWS, all_rows, put, row_logprobs, shard
from isojax.trainer.packing import Example, Placed, TrainBatch, pack


class Scored(NamedTuple):
    """Log-probabilities float32 [R] of an example's predicted tokens: full vocabulary, kept set."""

    full: np.ndarray
    kept: np.ndarray


class Scorer:
    """Scores sequences without gradients, with the forward that samples and trains."""

    def __init__(
        self,
        model: ModelConfig,
        policy: Policy,
        layout: Layout,
        mesh: Mesh,
        microbatch_tokens: int,
        longest: int | None = None,
    ) -> None:
        """microbatch_tokens, longest: see `isojax.trainer.step.Trainer`."""
        self._model, self._policy, self._layout = model, policy, layout
        self._mesh = mesh
        self._budget = microbatch_tokens
        self._longest = longest
        in_specs = (specs(model, policy, layout), ROWS)
        self.call = jax.jit(shard(self._rank_rows, mesh, in_specs, PartitionSpec()))

    @property
    def sure_to_fit(self) -> int:
        """Sequences of any length that fit into one leaf of a call; so few have one program."""
        return self._budget // (self._longest or self._budget)

    def _rank_rows(self, params: Any, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        full, kept = row_logprobs(
            params, batch, model=self._model, policy=self._policy, layout=self._layout
        )
        return all_rows(full, self._layout), all_rows(kept, self._layout)

    def __call__(self, params: Any, examples: Sequence[Example]) -> list[Scored]:
        """One `Scored` an example, in order.

        Raises:
          ValueError: if an example exceeds `microbatch_tokens`.
        """
        calls, placed = pack(
            examples, self._budget, self._policy, self._layout, longest=self._longest
        )
        rows = [jax.device_get(self.call(params, put(call, self._mesh))) for call in calls]
        return by_example(rows, placed, examples)


def by_example(
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    placed: Sequence[Placed],
    examples: Sequence[Example],
) -> list[Scored]:
    """One `Scored` an example from each call's (full, kept), float32 [T] of all data ranks."""
    found: list[Scored] = [Scored(np.empty(0), np.empty(0))] * len(examples)
    for at in placed:
        span = slice(at.row, at.row + examples[at.index].predicted)
        found[at.index] = Scored(*(x[span] for x in rows[at.call]))
    return found


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far two sets of log-probabilities of the same tokens are apart.

    differing: tokens whose bit patterns differ. diff_max, diff_mean: of |a - b|, nats.
    clipped: tokens whose ratio exp(b - a) would be clipped although no weight has moved.
    """

    tokens: int
    differing: int
    diff_max: float
    diff_mean: float
    clipped: int

    @property
    def exact(self) -> bool:
        return self.differing == 0


def compare(rollout: Sequence[np.ndarray], trainer: Sequence[np.ndarray], cap: float) -> Agreement:
    """Compare float32 log-probabilities token by token; a lone NaN counts as infinitely far.

    cap: a ratio of probabilities (trainer to rollout) above it is counted as clipped.
    """
    a, b = (
        np.concatenate([np.asarray(x, np.float32) for x in side]) for side in (rollout, trainer)
    )
    if a.shape != b.shape:
        raise ValueError(f"{a.size} rollout log-probabilities against {b.size} of the trainer")
    same = a.view(np.int32) == b.view(np.int32)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same, 0.0, b.astype(np.float64) - a)
        gap = np.where(np.isnan(gap), np.inf, gap)
        ratio = np.exp(gap)
    return Agreement(
        tokens=a.size,
        differing=int((~same).sum()),
        diff_max=float(np.abs(gap).max(initial=0.0)),
        diff_mean=float(np.abs(gap).mean()) if a.size else 0.0,
        clipped=int((ratio > cap).sum()),
    )
