"""Several processes: the bits of one, and an end that all of them come to."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from isojax import distributed
from isojax.config import RunConfig, WarmStartConfig
from isojax.config_io import build, to_toml
from isojax.mesh import Layout
from isojax.report.metrics import read_metrics
from isojax.rl.loop import Run
from tests import process_worker, test_loop
from tests.test_trainer import MODELS
from tests.util import assert_same_bits

ROOT = Path(__file__).parents[1]
LIMIT_S = 600


def launch(count: int, kind: str, *options, devices: int = 1, **environment) -> list:
    """Run `process_worker` as `count` processes; (exit status, stdout, stderr) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **environment}
    common = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count), *map(str, options)]
    with tempfile.TemporaryDirectory() as folder:
        files = [open(Path(folder) / str(i), "w+") for i in range(2 * count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.process_worker", kind, *common, "--process", str(i)],
                env=environment,
                cwd=ROOT,
                stdout=files[2 * i],
                stderr=files[2 * i + 1],
            )
            for i in range(count)
        ]
        try:
            # one that was stopped by a signal never ends: it is enough that the others do
            for process in processes:
                if f"SIGSTOP:{processes.index(process)}:" not in environment.get("ACCIDENT", ""):
                    process.wait(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for file in files:
            file.seek(0)
        text = [file.read() for file in files]
        for file in files:
            file.close()
    return [(p.returncode, text[2 * i], text[2 * i + 1]) for i, p in enumerate(processes)]


def test_a_signal_to_one_stops_all_at_the_same_step():
    found = launch(2, "loop", ACCIDENT="SIGTERM:1:10")
    lines = [[x for x in out.splitlines() if x.startswith("stopped")] for _, out, _ in found]
    assert [status for status, _, _ in found] == [130, 130], found
    assert lines[0] == lines[1] and lines[0][0].startswith("stopped together=True")


@pytest.mark.parametrize(
    ("accident", "status", "message"),
    [
        ("error:1:4", 1, "process 1 failed: no space left on device; HINT"),
        ("SIGSTOP:1:4", 1, "process 1 was lost: no sign of life for 5 s; HINT"),
        ("SIGKILL:0:4", None, "lost|leader task was preempted/died"),
        ("setting:1:10", 3, r"settings of process 1 differ .*: seed = 0 \(process 1: seed = 1\)"),
    ],
)
def test_what_befalls_one_ends_the_others(accident, status, message):
    found = launch(2, "loop", "--lost-after", 5, ACCIDENT=accident)
    victim = int(accident.split(":")[1])
    survivor, _, errors = found[1 - victim]
    assert survivor == status if status is not None else survivor not in (0, -9)
    assert re.search(message, errors), errors


def config(runs_dir: Path, name: str, mesh: str = "1x1", **changes) -> RunConfig:
    settings = {**test_loop.SETTINGS, "runs_dir": str(runs_dir), "name": name}
    settings["trainer"] = {**settings["trainer"], "checkpoint_every": 1}
    made = build(RunConfig, settings)
    changes = {"warm_start": WarmStartConfig(), "mesh": Layout.parse(mesh)} | changes
    return dataclasses.replace(made, **changes)


def run_on(count: int, config: RunConfig, folder: Path, **options) -> list:
    path = folder / f"{config.name}.toml"
    path.write_text(to_toml(config))
    (folder / config.name).mkdir()
    return launch(count, "run", "--config", path, RECORD=str(folder / config.name), **options)


@pytest.fixture
def one_process(tmp_path, monkeypatch):
    """config, resume -> the run that ends with it, on one process, its samples recorded."""
    monkeypatch.setattr(Run, "_agreement", Run._agreement)
    record = tmp_path / "one"
    record.mkdir()
    process_worker.record(record)
    for name, value in (
        ("jax_compilation_cache_dir", str(tmp_path / "cache")),
        ("jax_persistent_cache_min_compile_time_secs", 0.5),
    ):
        monkeypatch.setattr(jax.config, name, getattr(jax.config, name))
        jax.config.update(name, value)

    def run(config: RunConfig, resume: bool = False) -> Run:
        made = Run(config, resume=resume)
        made.run()
        return made

    return run


def assert_same_samples(folder: Path, want: Path, count: int, steps: range) -> None:
    for step in steps:
        for i in range(count):
            got, one = np.load(folder / f"{step}-{i}.npz"), np.load(want / f"{step}-0.npz")
            assert_same_bits([got[name] for name in one], [one[name] for name in one])


def state_of(run: Run, step: int | None = None):
    """Weights, master weights and optimizer state, as now or in a checkpoint."""
    state = run.state if step is None else run.checkpoints.restore(step)
    return jax.tree.map(np.asarray, (state.params, state.master, state.optimizer))


def rows_of(run: Run) -> list[dict]:
    rows = read_metrics(run.config.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time_")} for row in rows]
