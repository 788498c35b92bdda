"""`isojax generate` and `isojax score`: golden tokens, equal bits, honest lines."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from isojax.cli import jsonl, main
from isojax.mesh import Layout
from isojax.models import hf
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.tokenizer import TINY, Tokenizer
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
    whole = [{"tokens": p + g["token_ids"]} for p, g in zip(prompts, generated, strict=True)]
    status, scored = call("score", GOLDEN / case, whole, tmp_path, "--mesh", "2x2")
    assert status == 0
    for s, g in zip(scored, generated, strict=True):
        assert len(s["logprobs"]) == 77
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

    # at its temperature the trainer's forward agrees bit for bit
    prompts = [WORDS.encode("12 + 30"), WORDS.encode("7 * 8")]
    whole = [{"tokens": p + g["token_ids"]} for p, g in zip(prompts, good, strict=True)]
    status, scored = call("score", small, whole, tmp_path, "--temperature", 0.5)
    for s, p, g in zip(scored, prompts, good, strict=True):
        tail = s["logprobs"][len(p) - 1 :]
        assert_same_bits(as_float32(tail), as_float32(g["logprobs"]))


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
    assert cut[0]["finish_reason"] == "stop" and letter in cut[0]["text"]
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
    ]
    status, got = call("score", small, lines, tmp_path)
    assert status == 1 and len(got) == len(lines)
    assert got[0] == {**got[1], "tokens": tokens, "prompt_length": len(WORDS.encode(prompt))}
    assert len(got[1]["logprobs"]) == len(tokens) - 1 and got[2] == {"logprobs": []}
    assert [g["line"] for g in got if "error" in g] == [4, 5, 6, 7, 8, 9]
    assert len(got[-1]["logprobs"]) == 99


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
        (("--max-tokens", 4, "--checkpoint", tmp_path), "config.json"),
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


def test_layout_is_checked_by_the_parser(capsys):
    files = ["--checkpoint", "x", "--input", "y", "--output", "z"]
    with pytest.raises(SystemExit) as error:
        main(["score", *files, "--mesh", "8"])
    assert error.value.code == 2 and "DATAxMODEL" in capsys.readouterr().err
    assert Layout.parse("8x1") == Layout(8, 1)
