"""Plots of a run's metrics as PNG files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SIZE = (7.0, 4.0)  # inches


def draw_plots(rows: Sequence[Mapping[str, Any]], folder: str | Path) -> list[Path]:
    """Draw reward, log-probability difference, clip fraction, length and step time over steps.

    rows: steps as `read_metrics` gives them. Returns the files written; none without steps.

    Raises:
      ImportError: the `report` extra is not installed.
    """
    if not rows:
        return []
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(rows, folder / f"{name}.png", plot) for name, plot in _PLOTS.items()]


def _draw(rows: Sequence[Mapping[str, Any]], path: Path, plot: Callable[..., None]) -> Path:
    # the Figure interface needs no display and shares no state, unlike pyplot
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need: pip install "isojax[report]"') from error
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    plot(axes, _column(rows, "step"), lambda name: _column(rows, name))
    figure.savefig(path, dpi=120)
    return path


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A metric over steps, float64; NaN where a step lacks it."""
    return np.asarray([_number(row.get(name)) for row in rows], np.float64)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _reward(axes: Any, steps: np.ndarray, column: Callable[[str], np.ndarray]) -> None:
    mean, std = column("reward_mean"), column("reward_std")
    axes.plot(steps, mean, label="mean")
    axes.fill_between(steps, mean - std, mean + std, alpha=0.2, label="± standard deviation")
    axes.set_ylabel("reward")
    axes.legend()


def _logp_difference(axes: Any, steps: np.ndarray, column: Callable[[str], np.ndarray]) -> None:
    largest = column("logp_diff_max")
    axes.plot(steps, largest, "o-", markersize=3, label="max")
    axes.plot(steps, column("logp_diff_mean"), "o-", markersize=3, label="mean")
    # linear around 0, so that an exact 0 can be seen on the axis that shows 1e-7 and 1 alike
    axes.set_yscale("symlog", linthresh=1e-8)
    top = np.nanmax(largest) if np.isfinite(largest).any() else 0.0
    axes.set_ylim(-1e-8, max(10 * top, 1e-6))
    axes.set_ylabel("|logp of rollout - logp of trainer|")
    axes.legend()


def _clip_fraction(axes: Any, steps: np.ndarray, column: Callable[[str], np.ndarray]) -> None:
    axes.plot(steps, column("clip_fraction"))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("fraction of tokens clipped")


def _response_length(axes: Any, steps: np.ndarray, column: Callable[[str], np.ndarray]) -> None:
    axes.plot(steps, column("response_length_mean"))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean response length (tokens)")


def _step_time(axes: Any, steps: np.ndarray, column: Callable[[str], np.ndarray]) -> None:
    parts = ("generate", "score", "train")
    times = [np.nan_to_num(column(f"time_{part}_s")) for part in parts]
    axes.stackplot(steps, *times, labels=parts, alpha=0.8)
    axes.set_ylabel("time (s)")
    axes.legend(loc="upper left")


_PLOTS: dict[str, Callable[..., None]] = {
    "reward": _reward,
    "logp_difference": _logp_difference,
    "clip_fraction": _clip_fraction,
    "response_length": _response_length,
    "step_time": _step_time,
}
