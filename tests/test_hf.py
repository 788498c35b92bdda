"""Hugging Face checkpoints: in and out bit for bit, every published form, and honest errors."""

import json
import logging
import os
import pathlib
import shutil
import subprocess
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as peer  # the format's own library, against ours

from isojax.mesh import Layout
from isojax.models import hf
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.models.safetensors import open_file
from isojax.numerics.policy import Policy
from tests.util import EXACT, ONE, assert_same_bits

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
LOGITS = pathlib.Path(__file__).parent / "peer" / "logits.py"


def read(folder) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= peer.load_file(file)
    return tensors


def write(folder, case: str, tensors: dict[str, np.ndarray], **config) -> None:
    """A checkpoint of these tensors with the config of `case`, some of its keys replaced."""
    folder.mkdir(exist_ok=True)
    text = json.loads((GOLDEN / case / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(text))
    peer.save_file(tensors, folder / "model.safetensors")


def load(folder, layout=ONE, policy=EXACT):
    return hf.load(folder, layout.mesh(), layout, policy)


def published(name: str) -> str:
    return name.replace("model.", hf.TEXT_PREFIX, 1) if name.startswith("model.") else name


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bitwise(case, mesh, tmp_path):
    layout = Layout.parse(mesh)
    config, params = load(GOLDEN / case, layout)
    hf.save(tmp_path, config, params, shard_bytes=150_000)
    want, got = read(GOLDEN / case), read(tmp_path)
    text_only = {name: value for name, value in want.items() if "visual" not in name}
    if case.endswith("published"):
        got = {published(name): value for name, value in got.items()}
    assert_same_bits(got, text_only)
    assert list(sorted(got)) == sorted(text_only)
    again, same = load(tmp_path, layout)
    assert again == config
    assert_same_bits(same, params)


def test_shards_and_index(tmp_path):
    config, params = load(GOLDEN / "qwen3")
    hf.save(tmp_path, config, params, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == [f.name for f in files]
    for file in files:
        tensors = peer.load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 100_000
        assert all(index["weight_map"][name] == file.name for name in tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(tmp_path).values())
    hf.save(tmp_path, config, params)  # over it, in one file: no index may point at old shards
    assert_same_bits(load(tmp_path)[1], params)


def test_heads_that_ranks_outnumber_are_saved_as_they_are(tmp_path):
    layout = Layout(1, 8)
    path = tmp_path / "wide"
    config = ModelConfig.from_hf(json.loads((GOLDEN / "qwen3/config.json").read_text()))
    config = ModelConfig(**{**config.__dict__, "num_attention_heads": 8, "num_key_value_heads": 2})
    params = init_params(config, EXACT, layout, layout.mesh(), seed=0)
    hf.save(path, config, params)
    assert read(path)["model.layers.0.self_attn.k_proj.weight"].shape == (64, 64)
    assert_same_bits(load(path, layout)[1], params)
    assert_same_bits(load(path)[1], init_params(config, EXACT, ONE, ONE.mesh(), seed=0))


def test_fused_experts(tmp_path):
    tensors = read(GOLDEN / "qwen3_5_moe")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        take = lambda part: np.stack(  # noqa: E731
            [tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)]  # noqa: B023
        )
        tensors[prefix + "gate_up_proj"] = np.concatenate([take("gate"), take("up")], axis=1)
        tensors[prefix + "down_proj"] = take("down")
    write(tmp_path, "qwen3_5_moe", tensors)
    for layout in (ONE, Layout(4, 2)):
        assert_same_bits(load(tmp_path, layout)[1], load(GOLDEN / "qwen3_5_moe")[1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_sources_are_rounded_to_the_compute_dtype(dtype, tmp_path):
    tensors = {name: t.astype(dtype) for name, t in read(GOLDEN / "qwen3_next").items()}
    write(tmp_path, "qwen3_next", tensors)
    _, params = load(tmp_path, policy=Policy(compute_dtype="bfloat16"))
    want = np.ascontiguousarray(tensors["lm_head.weight"].T).astype(ml_dtypes.bfloat16)
    assert_same_bits(params["lm_head"], want)
    rate = np.stack([tensors["model.layers.1.linear_attn.A_log"].astype(np.float32)])
    assert_same_bits(params["layers"][1]["gdn"]["A_log"], rate)


def test_tied_embeddings(tmp_path):
    tensors = read(GOLDEN / "qwen3")
    write(tmp_path / "both", "qwen3", tensors, tie_word_embeddings=True)
    del tensors["lm_head.weight"]
    write(tmp_path / "one", "qwen3", tensors, tie_word_embeddings=True)
    config, params = load(tmp_path / "one")
    assert config.tie_word_embeddings and "lm_head" not in params
    assert_same_bits(load(tmp_path / "both")[1], params)
    hf.save(tmp_path / "saved", config, params)
    assert sorted(read(tmp_path / "saved")) == sorted(tensors)
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"]


def test_the_published_form_is_the_text_model(tmp_path, caplog):
    tensors = {published(name): t for name, t in read(GOLDEN / "qwen3_5_moe").items()}
    tensors |= {"model.visual.patch_embed.proj.weight": np.zeros((2, 2), np.float32)}
    tensors |= {f"mtp.layers.0.{x}.weight": np.zeros(3, np.float32) for x in ("fc", "norm")}
    write(tmp_path, "qwen3_5_moe_published", tensors)
    with caplog.at_level(logging.INFO, logger="isojax.models.hf"):
        _, params = load(tmp_path)
    assert_same_bits(params, load(GOLDEN / "qwen3_5_moe")[1])
    assert caplog.messages[0] == (
        "skipped 3 tensors that the text model does not use: "
        "model.visual.patch_embed.proj.weight, mtp.layers.* (2)"
    )


def test_one_error_names_every_tensor(tmp_path):
    tensors = read(GOLDEN / "qwen3_moe")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((8, 64), np.int32)
    write(tmp_path, "qwen3_moe", tensors)
    with pytest.raises(hf.CheckpointError) as error:
        load(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("tensors that differ: 5")
    assert sorted(lines[1:]) == [
        "  dtype: model.layers.0.mlp.gate.weight is int32, not float32, bfloat16 or float16",
        "  missing: model.layers.1.mlp.experts.5.up_proj.weight [32, 64]",
        "  missing: model.norm.weight [64]",
        "  shape: lm_head.weight is [159, 64], the config says [160, 64]",
        "  surplus: model.layers.0.self_attn.q_proj.bias [128]",
    ]


def test_a_tensor_that_the_index_promises_and_no_file_holds_is_missing(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5_moe_published", tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00005.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(hf.CheckpointError, match=r"missing: lm_head\.weight \[160, 64\]"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, 90_000])
def test_a_file_cut_short(keep, tmp_path):
    shutil.copytree(GOLDEN / "qwen3", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "\udcff", "config.json: not UTF-8"),
        ("config.json", "[1]", r"config.json: not an object: \[1\]"),
        (hf.INDEX, "{", f"{hf.INDEX}: not JSON"),
        (hf.INDEX, "{}", f"{hf.INDEX}: its weight_map names no tensors"),
        (hf.INDEX, '{"weight_map": ["x"]}', f"{hf.INDEX}: its weight_map names no tensors"),
        (hf.INDEX, '{"weight_map": {"x": 5}}', f"{hf.INDEX}: 5 in its weight_map is no file name"),
        (hf.INDEX, '{"weight_map": {"x": "y.st"}}', f"lacks files that {hf.INDEX} names: y.st"),
    ],
)
def test_damaged_json_is_named(file, text, message, tmp_path):
    shutil.copytree(GOLDEN / "qwen3", tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_every_mistyped_setting_is_named(tmp_path):
    changes = {
        "hidden_size": "32",
        "num_hidden_layers": True,
        "rms_norm_eps": float("nan"),
        "layer_types": "full_attention",
        "rope_parameters": {"rope_theta": "1e6"},
        "eos_token_id": ["</s>"],
    }
    write(tmp_path, "qwen3", read(GOLDEN / "qwen3"), **changes)
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    assert str(error.value) == (
        f'{tmp_path}/config.json: hidden_size is "32", not an integer; '
        "num_hidden_layers is true, not an integer; rms_norm_eps is NaN, not a finite number; "
        'layer_types is "full_attention", not a list of strings; '
        'eos_token_id is ["</s>"], not an integer or a list of integers; '
        'rope_parameters.rope_theta is "1e6", not a finite number'
    )


def test_yarn_beside_plain_rotary_settings_is_refused(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    for plain, other in (("rope_parameters", "rope_scaling"), ("rope_scaling", "rope_parameters")):
        scaled = {"rope_type": "yarn", "factor": 4.0}
        write(tmp_path, "qwen3", {}, **{plain: rope, other: scaled})
        with pytest.raises(ValueError, match=f"{other}: rope_type 'yarn' is not supported"):
            hf.load_config(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
        {"dtype": "F32", "shape": [1], "data_offsets": "04"},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": 5, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
        7,
    ],
)
def test_a_header_with_a_bad_entry(entry, tmp_path):
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ValueError, match=r"a\.safetensors: .*x "):
        open_file(tmp_path / "a.safetensors")


def test_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="none is not a folder"):
        load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    shutil.copy(GOLDEN / "qwen3/config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_the_model_is_never_held_twice(tmp_path):
    config, params = load(GOLDEN / "qwen3")
    config = ModelConfig(**{**config.__dict__, "vocab_size": 40_000})
    params = init_params(config, EXACT, ONE, ONE.mesh(), seed=0)
    hf.save(tmp_path, config, params)
    total = sum(a.nbytes for a in jax.tree.leaves(params))
    tracemalloc.start()
    load(tmp_path, Layout(1, 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # the arrays themselves, where jax keeps the host's memory, and a shard
    assert peak < 1.2 * total


def test_views_are_lazy():
    for tensor in open_file(GOLDEN / "qwen3/model.safetensors").values():
        assert not tensor.flags.owndata and not tensor.flags.writeable


@pytest.mark.skipif(
    "PEER_PYTHON" not in os.environ,
    reason="PEER_PYTHON names no Python interpreter with torch and transformers",
)
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_is_saved(case, tmp_path):
    layout = Layout(2, 2)
    config, params = load(GOLDEN / case, layout)
    hf.save(tmp_path / "saved", config, params, shard_bytes=300_000)
    np.save(tmp_path / "tokens.npy", np.load(GOLDEN / case / "expected.npz")["tokens"])
    logits = []
    for folder in (GOLDEN / case, tmp_path / "saved"):
        files = [str(tmp_path / name) for name in ("tokens.npy", "logits.npy")]
        peer_python = [os.environ["PEER_PYTHON"], str(LOGITS), str(folder), *files]
        subprocess.run(peer_python, check=True)
        logits.append(np.load(files[1]))
    assert_same_bits(logits[1], logits[0])
