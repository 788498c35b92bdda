"""metrics.jsonl: one JSON object a training step, in order of steps, also over resumed runs."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

# every step has at least these; times are in seconds, lengths in tokens
REQUIRED = (
    "step",
    "reward_mean",
    "reward_std",
    "logp_diff_max",
    "logp_diff_mean",
    "clip_fraction",
    "mismatch_clipped_tokens",
    "entropy",
    "response_length_mean",
    "tokens_generated",
    "tokens_trained",
    "grad_norm",
    "lr",
    "time_generate_s",
    "time_score_s",
    "time_train_s",
    "contract_digest",
)


class MetricsError(ValueError):
    """A metrics.jsonl that was not written by a run."""


class MetricsWriter:
    """Appends steps to a metrics.jsonl. Each line is on disk before `write` returns."""

    def __init__(self, path: str | Path, first_step: int = 1) -> None:
        """Open for the steps from `first_step` on, which count from 1.

        Lines of that step and later ones, which an interrupted run may have left, are removed, and
        so is a line that was cut off while it was written.
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self._path) if row["step"] < first_step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(temporary, self._path)
        self._last = kept[-1]["step"] if kept else first_step - 1
        self._file: TextIO = self._path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one step. NumPy and jax scalars become numbers; what is not finite becomes null.

        Raises:
          ValueError: a required metric is missing, or the step does not follow the last one.
        """
        missing = [name for name in REQUIRED if name not in metrics]
        if missing:
            raise ValueError(f"metrics without {', '.join(missing)}")
        row = {name: plain(value) for name, value in metrics.items()}
        if row["step"] <= self._last:
            raise ValueError(f"step {row['step']} does not follow step {self._last}")
        self._last = row["step"]
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl; none if there is no such file. A torn last line is left out.

    Raises:
      MetricsError: another line is not a step.
    """
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["step"] + 0
        except (json.JSONDecodeError, KeyError, TypeError):
            if number == len(lines):
                break
            raise MetricsError(f"{path}, line {number}: not a training step") from None
        rows.append(row)
    return rows


def plain(value: Any) -> Any:
    """A value as strict JSON holds it: scalars of arrays as numbers, NaN and infinities as None."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return number if math.isfinite(number) else None
    if isinstance(number, bool | int):
        return number
    raise TypeError(f"a metric must be a number or a string, got {type(value).__name__}")


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
