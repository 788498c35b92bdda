"""`isojax generate`, `score` and `export`: golden tokens, equal bits, honest lines."""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import isojax
from isojax.cli import jsonl, main
from isojax.config import RunConfig, resolve_model
from isojax.config_io import build, to_toml
from isojax.mesh import Layout
from isojax.models import hf
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.policy import Policy
from isojax.tokenizer import TINY, Tokenizer
from isojax.trainer.checkpoint import Checkpoints
from isojax.trainer.settings import adamw
from isojax.trainer.step import Trainer
from tests.util import EXACT, ONE, assert_same_bits

GOLDEN = pathlib.Path(__file__).parent / "golden"
WORDS = Tokenizer()
EOS = tuple(range(8, 512, 16))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of one layer, with a tokenizer; every id in EOS ends a response."""
    folder = tmp_path_factory.mktemp("small")
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=-(-WORDS.vocab_size // 8) * 8,
        hidden_size=32,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rotary_dim=16,
        intermediate_size=32,
        max_position_embeddings=100,
        eos_token_ids=EOS,
    )
    hf.save(folder, config, init_params(config, EXACT, ONE, ONE.mesh(), seed=0))
    for file in TINY.iterdir():
        shutil.copy(file, folder)
    return folder


def test_kernels_need_a_gpu(small, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.touch()
    files = ["--checkpoint", small, "--input", source, "--output", tmp_path / "out.jsonl"]
    assert main(["score", *map(str, files), "--evaluation", "mosaic"]) == 2
    assert "Hopper" in capsys.readouterr().err


def call(command, checkpoint, lines, folder, *options):
    """Exit status, and the objects that the command writes."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    files = ["--checkpoint", checkpoint, "--input", source, "--output", target]
    status = main([command, *map(str, [*files, *options])])
    return status, [json.loads(line) for line in target.read_text().splitlines()]


def as_float32(values):
    return np.asarray(values, np.float32)


def test_golden_continuation_and_its_score(tmp_path):
    case = "qwen3_5_moe_published"
    expected = np.load(GOLDEN / case / "expected.npz")
    prompts, greedy = expected["tokens"].tolist(), expected["greedy"].tolist()
    lines = [{"prompt_ids": prompt} for prompt in prompts]
    options = ("--max-tokens", 8, "--temperature", 0)
    status, generated = call("generate", GOLDEN / case, lines, tmp_path, *options)
    assert status == 0 and [g["token_ids"] for g in generated] == greedy
    status, scored = call("score", GOLDEN / case, generated, tmp_path, "--mesh", "2x2")
    assert status == 0
    for s, g in zip(scored, generated, strict=True):
        assert len(s["logprobs"]) == 77 and s["prompt_length"] == 70
        assert_same_bits(as_float32(s["logprobs"][69:]), as_float32(g["logprobs"]))
    logits = expected["logits"].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.take_along_axis(logp[:, :-1], expected["tokens"][:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose([s["logprobs"][:69] for s in scored], want, atol=2e-3)


def test_text_sampling_and_bad_lines(small, tmp_path):
    lines = [
        {"prompt": "12 + 30"},
        "not JSON\n",
        {"prompt": ""},
        "\n",
        {"prompt_ids": [0] * 100},
        {"prompt_ids": [3, WORDS.vocab_size + 8]},
        {"prompt_ids": [1], "prompt": "1"},
        {"prompt": "\ud800"},
        "[1, 2]\n",
        {"prompt_ids": [True]},
        {"prompt_ids": WORDS.encode("7 * 8")},
    ]
    options = ("--max-tokens", 5, "--seed", 3, "--temperature", 0.5, "--top-p", 0.9)
    status, got = call("generate", small, lines, tmp_path, *options)
    assert status == 1 and len(got) == 10
    assert [line["line"] for line in got if "error" in line] == [2, 3, 5, 6, 7, 8, 9, 10]
    assert all(g["error"].startswith(f"line {g['line']}: ") for g in got if "error" in g)
    good = [got[0], got[-1]]
    for line in good:
        assert line["text"] == WORDS.decode(line["token_ids"])
        assert len(line["logprobs"]) == len(line["token_ids"]) <= 5
        assert (line["finish_reason"] == "stop") == (line["token_ids"][-1] in EOS)

    # alone or in another order, a prompt gets the same sample
    status, again = call("generate", small, [lines[-1], lines[0]], tmp_path, *options)
    assert status == 0 and again == good[::-1]

    # the trainer's forward agrees bit for bit, at each line's temperature
    cold = {**options_of(options), "--temperature": 0}
    _, greedy = call("generate", small, [lines[0]], tmp_path, *itertools.chain(*cold.items()))
    status, scored = call("score", small, [*got, *greedy], tmp_path)
    assert status == 1 and [s["line"] for s in scored if "error" in s] == list(range(2, 10))
    assert "it is an error itself: line 2: not JSON" in scored[1]["error"]
    for s, g in zip([scored[0], *scored[-2:]], [*good, *greedy], strict=True):
        assert s["tokens"] == g["prompt_ids"] + g["token_ids"]
        assert s["prompt_length"] == len(g["prompt_ids"])
        tail = s["logprobs"][s["prompt_length"] - 1 :]
        assert_same_bits(as_float32(tail), as_float32(g["logprobs"]))
    assert good[0]["prompt_ids"] == WORDS.encode("12 + 30") and good[0]["temperature"] == 0.5

    # and at another one, where that is asked for
    tokens = [{"tokens": scored[0]["tokens"]}]
    _, hot = call("score", small, good[:1], tmp_path, "--temperature", 2)
    _, same = call("score", small, tokens, tmp_path, "--temperature", 2)
    assert hot[0]["logprobs"] == same[0]["logprobs"] != scored[0]["logprobs"]


def options_of(options):
    return dict(zip(options[::2], options[1::2], strict=True))


def test_end_of_sequence_and_stop_strings(small, tmp_path):
    lines = [{"prompt": text} for text in ("1 +", "2 +", "3 +", "40")]
    options = ("--max-tokens", 40, "--temperature", 3)
    _, stops = call("generate", small, lines, tmp_path, *options)
    _, ignores = call("generate", small, lines, tmp_path, *options, "--ignore-eos")
    assert any(line["finish_reason"] == "stop" for line in stops)
    for a, b in zip(stops, ignores, strict=True):
        assert b["finish_reason"] == "length" and len(b["token_ids"]) == 40
        assert a["token_ids"] == b["token_ids"][: len(a["token_ids"])]
        if a["finish_reason"] == "stop":
            assert a["token_ids"][-1] in EOS and not {*a["token_ids"][:-1]} & {*EOS}
    letter = WORDS.decode(ignores[0]["token_ids"])[2]
    stopping = ("--ignore-eos", "--stop", letter)
    _, cut = call("generate", small, lines[:1], tmp_path, *options, *stopping)
    assert cut[0]["finish_reason"] == "stop" and len(cut[0]["logprobs"]) == len(cut[0]["token_ids"])
    whole = WORDS.decode(cut[0]["token_ids"])
    assert letter in whole and cut[0]["text"] == whole[: whole.index(letter)]
    assert cut[0]["token_ids"] == ignores[0]["token_ids"][: len(cut[0]["token_ids"])]


def test_score_of_text_and_bad_lines(small, tmp_path):
    prompt, response = "3 + 4 =", " 7"
    tokens = WORDS.encode(prompt) + WORDS.encode(response)
    lines = [
        {"prompt": prompt, "response": response},
        {"tokens": tokens},
        {"tokens": [5]},
        {"tokens": []},
        {"tokens": tokens, "prompt": prompt},
        {"prompt": prompt},
        {"tokens": [1, 2.0]},
        {"tokens": [1, -1]},
        {"tokens": [1] * 101},
        {"tokens": [1] * 100},
        {"tokens": tokens, "temperature": 1e-300},
        {"prompt_ids": [1], "token_ids": [2], "tokens": [1, 2]},
        {"prompt_ids": [1], "token_ids": []},
    ]
    status, got = call("score", small, lines, tmp_path)
    assert status == 1 and len(got) == len(lines)
    assert got[0] == {**got[1], "tokens": tokens, "prompt_length": len(WORDS.encode(prompt))}
    assert len(got[1]["logprobs"]) == len(tokens) - 1 and got[2] == {"logprobs": []}
    assert [g["line"] for g in got if "error" in g] == [4, 5, 6, 7, 8, 9, 11, 12, 13]
    assert len(got[9]["logprobs"]) == 99


def test_what_stops_the_command(small, tmp_path, capsys):
    assert call("score", small, [], tmp_path) == (0, [])
    line = [{"prompt_ids": [1]}]
    (tmp_path / "out.jsonl").write_text("")
    for options, message in (
        (("--max-tokens", 0), "max_tokens must be an integer of at least 1, got 0"),
        (("--max-tokens", 4, "--top-p", 1.5), "top_p must be within (0, 1], got 1.5"),
        (("--max-tokens", 4, "--output", tmp_path / "in.jsonl"), "--output would overwrite"),
        (("--max-tokens", 4, "--output", tmp_path / "a/b"), "is in no folder that exists"),
        (("--max-tokens", 4, "--mesh", "4x4"), "needs 16 devices"),
        (("--max-tokens", 4, "--mesh", "1x4"), "cannot cut this model"),
        (("--max-tokens", 4, "--checkpoint", tmp_path), "has no config.json"),
        (("--max-tokens", 4, "--checkpoint", tmp_path / "x"), "x is not a folder"),
        (("--max-tokens", 4, "--max-sequences", 0), "max_sequences must be at least 1, got 0"),
        (("--max-tokens", 4, "--input", tmp_path / "none"), "none"),
    ):
        assert call("generate", small, line, tmp_path, *options)[0] == 2
        error = capsys.readouterr().err
        assert error.startswith("isojax generate: ") and message in error
        assert "Traceback" not in error


def test_floats_read_back_to_the_same_bits():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 10_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    values = np.concatenate([values, np.float32([-0.0, 0.0, 1e-45, -3.4e38])])
    text = json.dumps(jsonl.floats(values))
    assert_same_bits(as_float32(json.loads(text)), values)
    for bad in (np.nan, np.inf):
        with pytest.raises(jsonl.BadLine):
            jsonl.floats(np.float32([0.0, bad]))


def test_results_are_written_in_the_order_of_the_input(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"a": 0}\n\n{"a": 1}\r\n\xff\n{"a": "\xc3\xa9"}')
    lines = jsonl.read(source)
    assert [line.number for line in lines] == [1, 3, 4, 5]
    assert str(lines[2].value) == "not UTF-8" and lines[3].value == {"a": "é"}
    target = tmp_path / "out.jsonl"
    with jsonl.Writer(target, lines) as writer:
        for index in (1, 3, 0, 2):
            value = lines[index].value
            writer.put(lines[index], value)
            if index == 3:
                assert target.read_text() == ""
        assert writer.failed == 1
    text = target.read_text(encoding="utf-8").splitlines()
    assert text == [
        '{"a": 0}',
        '{"a": 1}',
        '{"error": "line 4: not UTF-8", "line": 4}',
        '{"a": "é"}',
    ]


FILES = ("--checkpoint", "x", "--input", "y", "--output", "z")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("score", *FILES, "--mesh", "8"), "a mesh is written DATAxMODEL"),
        (("verify", "--config", "x", "--mesh", "0x1"), "a mesh is written DATAxMODEL"),
        (("contract", "audit", "--config", "x", "--mesh", "a"), "a mesh is written DATAxMODEL"),
        (("score", *FILES, "--temperature", "warm"), "wanted a number, got 'warm'"),
        (("score", *FILES, "--temperature", "1e-300"), "1e-300 is too small; 0 is greedy"),
        (("generate", *FILES, "--max-tokens", "1", "--temperature", "-1"), "must not be negative"),
        (("score", *FILES, "--temprature=1"), "--temprature=1 (did you mean --temperature?)"),
    ],
)
def test_the_parser_says_what_is_wanted(line, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(line)
    said = capsys.readouterr().err
    assert error.value.code == 2 and message in said and said.count("\n") == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0 and capsys.readouterr().out == f"isojax {isojax.__version__}\n"


def test_a_cpu_has_the_devices_of_a_mesh():
    """In a process of its own: the devices are there before jax starts, or never."""
    code = (
        "import jax; from isojax.arguments import as_layout, provide_devices;"
        "provide_devices(as_layout('2x3')); print(len(jax.devices()))"
    )
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert run.stdout == b"6\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with two checkpoints, and the weights of each."""
    runs = tmp_path_factory.mktemp("runs")
    model = {"model_type": "qwen3", "vocab_size": 512, "hidden_size": 32, "num_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rotary_dim": 16,
             "intermediate_size": 32, "eos_token_ids": [2]}  # fmt: skip
    config = build(RunConfig, {"name": "small", "runs_dir": str(runs), "model": model})
    config.folder.mkdir()
    (config.folder / "config.toml").write_text(to_toml(config))
    layout, weights = Layout(2, 2), {}
    trainer = Trainer(
        resolve_model(config), config.policy, layout, layout.mesh(), adamw(config),
        microbatch_tokens=64, remat=False,
    )  # fmt: skip
    checkpoints = Checkpoints(config.folder / "checkpoints", trainer)
    for step in (3, 4):
        params = init_params(trainer.model, config.policy, layout, trainer.mesh, seed=step)
        _, master, state = vars(trainer.init(params)).values()
        # between two bfloat16 numbers, so that a weight is not its master's first half
        master = jax.tree.map(lambda x: x * np.float32(1.003), master)
        checkpoints.save(step, trainer.from_master(master, state), {})
        weights[step] = jax.device_get(trainer.from_master(master, state).params)
    checkpoints.close()
    return config.folder, weights


def test_export(trained, tmp_path, capsys):
    run, weights = trained
    for step, options in ((4, ()), (3, ("--step", "3"))):
        folder = tmp_path / "exports" / str(step)
        assert main(["export", str(run), str(folder), *options]) == 0
        assert capsys.readouterr().out.endswith(f"after step {step}\n")
        _, params = hf.load(folder, ONE.mesh(), ONE, Policy())
        assert params["embed"].dtype == "bfloat16"
        assert_same_bits(params, weights[step])
    status, lines = call("generate", folder, [{"prompt": "1 +"}], tmp_path, "--max-tokens", 2)
    assert status == 0 and lines[0]["prompt_ids"] == WORDS.encode("1 +")
    assert Tokenizer(folder).eos_ids == (2,)


def test_what_export_refuses(trained, tmp_path, capsys):
    run, _ = trained
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "config.toml", bare)
    tied = tmp_path / "tied"
    tied.mkdir()
    (tied / "checkpoints").symlink_to(run / "checkpoints")
    text = (run / "config.toml").read_text()
    changed = text.replace("tie_word_embeddings = false", "tie_word_embeddings = true")
    (tied / "config.toml").write_text(changed)
    new = tmp_path / "new"
    for source, target, options, message in (
        (tmp_path, new, (), "is not the folder of a run: it has no config.toml"),
        (tmp_path / "none", new, (), "none is not the folder of a run"),
        (bare, new, (), "checkpoints is not a folder"),
        (run, new, ("--step", "5"), "no checkpoint of step 5 in"),
        (run, new, ("--step", "5"), "there are: 3, 4"),
        (run, bare, (), "bare exists already, and is not an empty folder"),
        (tied, new, (), "4 is not a checkpoint of this model"),
    ):
        assert main(["export", str(source), str(target), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("isojax export: ") and message in error
    assert not new.exists() and not (bare / "checkpoints").exists()
