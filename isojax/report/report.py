"""The record of a run: metrics.jsonl, TensorBoard events, plots, and a line a step."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from isojax import distributed
from isojax.config import ReportConfig
from isojax.report.events import EventWriter
from isojax.report.metrics import MetricsWriter, read_metrics
from isojax.report.plots import draw_plots


class Report:
    """Writes what a training step measured to every place that a run keeps it in.

    Of several processes only the first one writes and prints.

    A context manager: leaving it, also by an exception, draws the plots and closes the files.
    """

    def __init__(
        self, folder: str | Path, config: ReportConfig, steps: int, first_step: int = 1
    ) -> None:
        """folder: the run folder. steps: of the whole run. first_step: where this part begins."""
        self._folder, self._config, self._steps = Path(folder), config, steps
        self._metrics: MetricsWriter | None = None
        self._events: EventWriter | None = None
        if distributed.first():
            self._metrics = MetricsWriter(self._folder / "metrics.jsonl", first_step)
            if config.tensorboard:
                self._events = EventWriter(self._folder / "tensorboard", first_step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record one step and print its line; `metrics` has at least `metrics.REQUIRED`."""
        if self._metrics is None:
            return
        self._metrics.write(metrics)
        if self._events:
            self._events.write(metrics)
        print(step_line(metrics, self._steps), flush=True)
        every = self._config.plot_every
        if every and int(metrics["step"]) % every == 0:
            self._plot()

    def progress[T](self, items: Iterable[T], text: str, total: int | None = None) -> Iterator[T]:
        """`items`, with a progress bar on a terminal while they are gone through."""
        return progress(items, text, total, enabled=self._config.progress)

    def close(self) -> None:
        if self._metrics is None:
            return
        self._metrics.close()
        if self._events:
            self._events.close()
        self._plot()

    def _plot(self) -> None:
        draw_plots(read_metrics(self._folder / "metrics.jsonl"), self._folder / "plots")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_line(metrics: Mapping[str, Any], steps: int) -> str:
    """What a terminal shows of a step."""
    total = sum(float(metrics[f"time_{part}_s"]) for part in ("generate", "score", "train"))
    return (
        f"step {int(metrics['step']):>{len(str(steps))}}/{steps}"
        f"  reward {metrics['reward_mean']:.3f} ± {metrics['reward_std']:.3f}"
        f"  max|Δlogp| {metrics['logp_diff_max']:.3g}"
        f"  clipped {100 * metrics['clip_fraction']:.2f}%"
        f"  length {metrics['response_length_mean']:.1f}"
        f"  grad {metrics['grad_norm']:.3g}"
        f"  {total:.1f} s (generate {metrics['time_generate_s']:.1f},"
        f" train {metrics['time_train_s']:.1f})"
    )


def progress[T](
    items: Iterable[T], text: str, total: int | None = None, *, enabled: bool = True
) -> Iterator[T]:
    """`items`, with a progress bar on the first process's standard error if that is a terminal."""
    if not (enabled and distributed.first() and sys.stderr.isatty()):
        return iter(items)
    from tqdm import tqdm

    return iter(tqdm(items, desc=text, total=total, leave=False, dynamic_ncols=True))
