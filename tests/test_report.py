import json

import numpy as np
import pytest

from isojax.config import ReportConfig
from isojax.report.metrics import REQUIRED, MetricsError, MetricsWriter, read_metrics
from isojax.report.plots import draw_plots
from isojax.report.report import Report, progress, step_line


def metrics(step, **changes):
    return dict.fromkeys(REQUIRED, 0.5) | {"step": step, "contract_digest": "ab"} | changes


def steps_of(path):
    return [row["step"] for row in read_metrics(path)]


def test_values_become_strict_json(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(
        metrics(
            np.int32(1), grad_norm=float("nan"), lr=np.float32(1e-3), entropy=np.float64("-inf"),
            tokens_trained=np.int64(7), logp_diff_max=np.float32(0), done=np.bool_(True),
        )
    )  # fmt: skip

    def refuse(text):
        raise AssertionError(text)

    (line,) = path.read_text().splitlines()  # on disk before the file is closed
    row = json.loads(line, parse_constant=refuse)
    assert row["grad_norm"] is None and row["entropy"] is None
    assert np.float32(row["lr"]) == np.float32(1e-3)
    assert (row["step"], row["tokens_trained"], row["done"]) == (1, 7, True)
    assert row["logp_diff_max"] == 0.0
    with pytest.raises(TypeError, match="ndarray|list|ValueError"):
        writer.write(metrics(2, extra=[1]))
    writer.close()


def test_missing_metrics_and_repeated_steps_are_errors(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    incomplete = metrics(1)
    del incomplete["entropy"]
    with pytest.raises(ValueError, match="without entropy"):
        writer.write(incomplete)
    writer.write(metrics(1))
    with pytest.raises(ValueError, match="does not follow"):
        writer.write(metrics(1))
    writer.close()
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write(metrics(step))
    writer.close()
    before = path.read_bytes()
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    assert steps_of(path) == [1, 2, 3, 4, 5]
    writer = MetricsWriter(path, first_step=4)
    assert steps_of(path) == [1, 2, 3]
    assert before.startswith(path.read_bytes())
    writer.write(metrics(4))
    writer.close()
    assert steps_of(path) == [1, 2, 3, 4]
    MetricsWriter(path).close()  # a run from the start
    assert steps_of(path) == []


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2"):
        read_metrics(path)


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [metrics(i, logp_diff_max=0.0, entropy=None, grad_norm=None) for i in range(3)]
    files = draw_plots(rows, tmp_path / "plots")
    assert {file.stem for file in files} == {
        "reward", "logp_difference", "clip_fraction", "response_length", "step_time",
    }  # fmt: skip
    for file in files:
        width, height = png_size(file)
        assert width > 400 and height > 300
    assert draw_plots([], tmp_path / "none") == []
    nothing = [dict.fromkeys(REQUIRED) | {"step": 0}]
    assert len(draw_plots(nothing, tmp_path / "nulls")) == 5


def test_report_writes_everything_and_closes_on_an_exception(tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    config = ReportConfig(plot_every=2)
    with pytest.raises(KeyboardInterrupt), Report(tmp_path, config, steps=9) as report:
        report.step(metrics(1))
        assert not (tmp_path / "plots").exists()
        report.step(metrics(2, reward_mean=0.25))
        assert (tmp_path / "plots" / "reward.png").exists()
        report.step(metrics(3))
        raise KeyboardInterrupt
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].startswith("step 2/9  reward 0.250")


def scalars(folder):
    """(tag, step) pairs of every event file of a folder."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(value.tag, event.step) for value in event.summary.value]
    return found


def test_events(tmp_path):
    pytest.importorskip("tensorboardX")
    with Report(tmp_path, ReportConfig(plot_every=0), steps=3) as report:
        report.step(metrics(1, entropy=float("nan")))
    with Report(tmp_path, ReportConfig(plot_every=0), steps=3, first_step=2) as report:
        report.step(metrics(2))
    found = scalars(tmp_path / "tensorboard")
    assert ("exactness/logp_diff_max", 1) in found and ("reward/reward_mean", 2) in found
    assert ("policy/entropy", 1) not in found and ("policy/entropy", 2) in found
    assert not any("contract" in tag for tag, _ in found)
    with Report(tmp_path / "b", ReportConfig(tensorboard=False), steps=1) as report:
        report.step(metrics(1))
    assert not (tmp_path / "b" / "tensorboard").exists()


def test_line_shows_an_exact_zero():
    line = step_line(metrics(12, logp_diff_max=0.0), steps=100)
    assert line.startswith("step  12/100") and "max|Δlogp| 0 " in line


def test_progress_gives_every_item_without_a_terminal():
    assert list(progress(range(3), "x")) == [0, 1, 2]
