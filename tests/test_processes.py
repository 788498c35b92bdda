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
from isojax.config import RunConfig
from isojax.config_io import build, to_toml
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy
from isojax.report.metrics import read_metrics
from isojax.trainer.checkpoint import Checkpoints
from isojax.trainer.optimizer import AdamW
from isojax.trainer.step import Trainer
from tests import test_loop
from tests.test_meshes import MODELS
from tests.util import assert_same_bits

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800


def launch(count: int, kind: str, *options, devices: int = 1, **environment) -> list:
    """Run `process_worker` as `count` processes; (exit status, stdout, stderr) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **environment}
    common = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count)]
    with tempfile.TemporaryDirectory() as folder:
        files = [open(Path(folder) / str(i), "w+") for i in range(2 * count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.process_worker", kind, *map(str, options)]
                + [*common, "--process", str(i)] * (count > 1),
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


def test_what_does_not_say_where_the_processes_are_is_refused():
    with pytest.raises(ValueError, match="--coordinator, --process is not given"):
        distributed.join("none", processes=2)
    with pytest.raises(ValueError, match="--processes, --process is not given"):
        distributed.join("none", "127.0.0.1:1")
    with pytest.raises(ValueError, match="--process 2 is not within"):
        distributed.join("none", "127.0.0.1:1", 2, 2)


def test_launchers(monkeypatch):
    """SLURM is joined where it has several tasks, and only there; Kubernetes if asked for."""
    asked = []

    def initialize(*arguments, cluster_detection_method, **_):
        asked.append((*arguments, cluster_detection_method))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in ("JOB_ID", "STEP_NODELIST", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for tasks, cluster in (("1", "auto"), ("2", "auto"), ("2", "none"), ("1", "k8s")):
        monkeypatch.setenv("SLURM_NTASKS", tasks)
        distributed.join(cluster)
    assert asked == [(None, None, None, "slurm"), (None, None, None, None)]
    distributed.join("auto", "a:1", 2, 1)  # said in full, nobody is asked
    assert asked[2:] == [("a:1", 2, 1, "deactivate")]


def test_one_process_agrees_with_itself():
    assert (distributed.index(), distributed.count(), distributed.first()) == (0, 1, True)
    assert distributed.exchange("a") == ["a"] and distributed.share(lambda: {"a": (1,)})
    distributed.check_same("anything", np.zeros(1))
    distributed.ask_to_stop()
    assert not distributed.stop_here() and distributed.arrive() and distributed.leave(7) == 7


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


SMALL = build(ModelConfig, test_loop.SETTINGS["model"])
# as many tokens as the tokenizer of the tasks, and what ends a response
WORDS = {"vocab_size": 512, "eos_token_ids": (2,), "max_position_embeddings": 128}


class Runs:
    """Runs of the main job in a folder, each in processes of its own."""

    def __init__(self, folder: Path, model: ModelConfig, contract: str) -> None:
        self.folder, self.model, self.contract = folder, model, contract

    def start(self, name: str, mesh: str, count: int = 1, accident: str = "none", **options):
        settings = {**test_loop.SETTINGS, "runs_dir": str(self.folder), "name": name}
        settings["trainer"] = {**settings["trainer"], "checkpoint_every": 1}
        del settings["warm_start"]
        config = dataclasses.replace(
            build(RunConfig, settings), model=self.model, mesh=Layout.parse(mesh)
        )
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(config))
        return self._launch(count, name, accident, "--config", path, **options)

    def resume(self, name: str, mesh: str, count: int = 1, **options):
        data, model = mesh.split("x")
        own = ("--resume", self.folder / name, "--mesh.data", data, "--mesh.model", model)
        return self._launch(count, name, "none", *own, **options)

    def _launch(self, count: int, name: str, accident: str, *options, devices: int = 1):
        record = self.folder / f"{name}-samples"
        record.mkdir(exist_ok=True)
        return launch(
            count,
            "run",
            *options,
            "--lost-after",
            15,
            devices=devices,
            ACCIDENT=accident,
            CONTRACT=self.contract,
            RECORD=str(record),
            JAX_COMPILATION_CACHE_DIR=str(self.folder / "cache"),
        )

    def samples(self, name: str, step: int, process: int) -> list[np.ndarray]:
        """What a process sampled and scored in a step."""
        found = np.load(self.folder / f"{name}-samples" / f"{step}-{process}.npz")
        return [found[key] for key in sorted(found)]

    def state(self, name: str, step: int):
        """Weights, master weights and optimizer state of a checkpoint."""
        layout, policy = Layout(), Policy()
        trainer = Trainer(
            self.model, policy, layout, layout.mesh(), AdamW(), microbatch_tokens=64, remat=False
        )
        saved = Checkpoints(self.folder / name / "checkpoints", trainer)
        state = saved.restore(step)
        saved.close()
        return jax.tree.map(np.asarray, (state.params, state.master, state.optimizer))

    def rows(self, name: str) -> list[dict]:
        """metrics.jsonl, times left out."""
        rows = read_metrics(self.folder / name / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith("time_")} for row in rows]

    def assert_same(self, name: str, want: str, count: int, steps: range) -> None:
        """The processes' samples in these steps, and the checkpoints behind them."""
        for step in steps:
            for process in range(count):
                assert_same_bits(self.samples(name, step, process), self.samples(want, step, 0))
            assert_same_bits(self.state(name, step + 1), self.state(want, step + 1))


@pytest.mark.slow
def test_two_processes_are_one_and_a_killed_run_goes_on(tmp_path):
    """Two processes of two devices, one killed in the last step; one process takes over."""
    runs = Runs(tmp_path, SMALL, "committed")
    found = runs.start("one", "1x1")
    assert found[0][0] == 0, found[0][2]
    (status, out, errors), _ = runs.start("two", "2x2", 2, "SIGKILL:1:2", devices=2)
    assert status == 1, errors
    # by a collective that broke, or by the watch
    hint = re.escape(f"go on with: --resume {tmp_path}/two")
    assert re.search(rf"process 1 was lost: no sign of life for \d+ s; {hint}", errors), errors
    assert "step 2/3" in out and "step 3/3" not in out
    runs.assert_same("two", "one", 2, range(2))
    assert_same_bits(runs.samples("two", 2, 0), runs.samples("one", 2, 0))
    ((status, _, errors),) = runs.resume("two", "1x1")
    assert status == 0, errors
    runs.assert_same("two", "one", 1, range(2, 3))
    assert runs.rows("two") == runs.rows("one")


FOUR = {name: dataclasses.replace(model, **WORDS) for name, model in MODELS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_are_one(tmp_path, name):
    """Both axes of the mesh between processes; a signal to one, and four go on."""
    runs = Runs(tmp_path, FOUR[name], "own")
    found = runs.start("one", "1x1")
    assert found[0][0] == 0, found[0][2]
    found = runs.start("four", "2x2", 4, "SIGTERM:2:0")
    assert [status for status, _, _ in found] == [130] * 4, found
    found = runs.resume("four", "4x1", 4)
    assert [status for status, _, _ in found] == [0] * 4, found
    runs.assert_same("four", "one", 4, range(3))
    assert runs.rows("four") == runs.rows("one")
