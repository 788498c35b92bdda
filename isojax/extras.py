"""Optional packages: those that a run's settings need are looked for before anything is built."""

import importlib.util

from isojax.config import RunConfig


def check_extras(config: RunConfig) -> None:
    """Every optional package that a run will import is installed.

    Raises:
      ImportError: naming all that are missing and what installs them.
    """
    needed = [("report", "matplotlib", "plots")]
    if config.report.tensorboard:
        needed.append(("report", "tensorboardX", "report.tensorboard"))
    if config.data.source == "reasoning_gym":
        needed.append(("data", "reasoning_gym", 'data.source = "reasoning_gym"'))
    if config.data.source == "parquet":
        needed.append(("data", "pyarrow", 'data.source = "parquet"'))
    if config.data.reward == "math":
        needed.append(("data", "math_verify", 'data.reward = "math"'))
    missing = [item for item in needed if importlib.util.find_spec(item[1]) is None]
    if missing:
        what = ", ".join(f"{package} ({why})" for _, package, why in missing)
        extras = ",".join(sorted({extra for extra, _, _ in missing}))
        raise ImportError(f'this run needs {what}: pip install "isojax[{extras}]"')
