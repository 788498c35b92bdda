"""The main job's command line: what a user gets wrong is one message, before anything is built."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from isojax.config_io import load, to_toml
from isojax.rl.data import DataError
from isojax.trainer.checkpoint import Checkpoints
from tests.test_checkpoint import flip
from tests.test_trainer import start, trainer_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def job():
    path = ROOT / "experiments" / "dapo_qwen.py"
    spec = importlib.util.spec_from_file_location("dapo_qwen", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has made its last step."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    folder.mkdir()
    config = load(ROOT / "configs" / "tiny.toml")
    (folder / "config.toml").write_text(to_toml(config))
    trainer = trainer_of("dense", "1x1")
    saved = Checkpoints(folder / "checkpoints", trainer)
    warm, steps = config.warm_start.steps, config.steps
    position = {"warm": warm, "step": steps, "stream": 9}
    saved.save(warm + steps, start(trainer), {"position": position})
    saved.close()
    return folder


class Refused:
    """In place of a run: nothing heavy may be begun."""

    def __init__(self, *arguments, **options):
        raise AssertionError("a run was built")


def test_a_finished_run_is_not_built_again_from_within_its_folder(
    job, finished, monkeypatch, capsys
):
    monkeypatch.setattr(job, "Run", Refused)
    monkeypatch.chdir(finished)
    before = sorted(finished.parent.rglob("*"))
    for name in (".", f"../{finished.name}", str(finished)):
        assert job.main(["--resume", name]) == 0
        assert capsys.readouterr().out.startswith(f"finished: {finished} has its 30 steps")
    assert sorted(finished.parent.rglob("*")) == before
    with pytest.raises(AssertionError, match="built"):
        job.main(["--resume", ".", "--steps", "31"])


def test_a_damaged_checkpoint_is_one_message(job, finished, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(finished, tmp_path / "b")
    (position,) = folder.rglob("position/metadata")
    flip(position)
    monkeypatch.setattr(job, "Run", Refused)
    assert job.main(["--resume", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint ") and "position/metadata" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh.data", "3"], "mesh 3x1 is not admitted: "),
        (["--mesh.data", "0"], "command line: mesh.data must be at least 1, got 0"),
        (["--data.source", "jsonl", "--data.path", "absent", "--data.reward", "exact"], "no file"),
        (["--data.reward", "absent:f"], "data.reward 'absent:f'"),
    ],
)
def test_mistakes_are_found_first(job, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert job.main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_found_first_and_together(job, tmp_path, monkeypatch, capsys):
    for name in ("matplotlib", "tensorboardX", "math_verify"):
        monkeypatch.setitem(sys.modules, name, None)
    assert job.main(["--runs-dir", str(tmp_path), "--data.reward", "math"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in ("matplotlib (plots)", "tensorboardX", "math_verify"):
        assert name in line
    assert line.endswith('pip install "isojax[data,report]"')
    assert not list(tmp_path.iterdir())


def run_that_raises(error):
    class Raises:
        def __init__(self, config, **options):
            self.config = config

        def run(self):
            raise error

    return Raises


def test_a_users_error_is_a_line_and_a_defect_a_traceback(job, monkeypatch, capsys):
    for error in (DataError("too long"), OSError("No space left"), ImportError("plots need x")):
        monkeypatch.setattr(job, "Run", run_that_raises(error))
        assert job.main([]) == 1
        assert capsys.readouterr().err == f"error: {error}\n"
    monkeypatch.setattr(job, "Run", run_that_raises(ValueError("shapes differ")))
    with pytest.raises(ValueError, match="shapes differ"):
        job.main([])
