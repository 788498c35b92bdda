"""TensorBoard events of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isojax.report.metrics import plain

# metrics by the heading that TensorBoard shows them under; the others stand under "other"
_HEADINGS = {
    "reward": ("reward", "groups", "rounds"),
    "exactness": ("logp_diff", "mismatch"),
    "policy": ("clip", "entropy", "loss"),
    "response": ("response",),
    "optimizer": ("grad_norm", "lr"),
    "throughput": ("time", "tokens"),
}


class EventWriter:
    """Writes each numeric metric of a step as a scalar."""

    def __init__(self, folder: str | Path, first_step: int = 1) -> None:
        """Open `folder`; TensorBoard will not show earlier events of `first_step` and later.

        Raises:
          ImportError: the `report` extra is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError('report.tensorboard needs: pip install "isojax[report]"') from error
        # files are named by the second: a run resumed within it would overwrite the first
        suffix = f".{first_step}"
        self._writer = SummaryWriter(str(folder), purge_step=first_step, filename_suffix=suffix)

    def write(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            number = plain(value)
            if name != "step" and isinstance(number, int | float):
                self._writer.add_scalar(f"{_heading(name)}/{name}", number, int(metrics["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _heading(name: str) -> str:
    for heading, prefixes in _HEADINGS.items():
        if name.startswith(prefixes):
            return heading
    return "other"
