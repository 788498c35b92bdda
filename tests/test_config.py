import argparse
import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from isojax.config import AlgorithmConfig, DataConfig, RunConfig, SamplerConfig, resolve_model
from isojax.config_io import (
    ConfigError,
    add_arguments,
    build,
    leaves,
    load,
    parse_arguments,
    to_toml,
)

CONFIGS = Path(__file__).parents[1] / "configs"


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["tiny", "qwen3_5_35b_a3b"])
def test_shipped_configs_load_and_round_trip(name, tmp_path):
    config = load(CONFIGS / f"{name}.toml")
    assert config.name == name
    assert load(write(tmp_path, to_toml(config))) == config


def test_published_hyperparameters():
    config = load(CONFIGS / "qwen3_5_35b_a3b.toml")
    assert (config.model.num_layers, config.model.period, config.mesh.devices) == (40, 4, 8)
    assert config.model.rotary_dim == 64 and config.model.rope_theta == 1e7
    assert config.algorithm == AlgorithmConfig(overlong_filter=True)
    assert config.trainer.warmup_steps == 40 and config.trainer.minibatch_prompts == 32


def test_unknown_keys_suggest_the_nearest_name(tmp_path):
    text = 'checkpoint = "x"\nnmae = "a"\n[sampler]\nmax-tokens = 3\n[trainr]\nremat = true\n'
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text))
    for part in (
        "nmae (did you mean name?)",
        "sampler.max-tokens (did you mean sampler.max_tokens?)",
        "trainr (did you mean trainer?)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('sampler.max_tokens = "64"', 'sampler.max_tokens: expected integer, got "64"'),
        ("sampler.max_tokens = 1.5", "sampler.max_tokens: expected integer, got 1.5"),
        ("sampler.max_tokens = true", "sampler.max_tokens: expected integer, got true"),
        ("sampler.temperature = true", "sampler.temperature: expected number"),
        ('sampler.stop = "x"', "sampler.stop: expected list of string"),
        ("sampler.stop = [1]", "sampler.stop.0.: expected string, got 1"),
        ("sampler = 3", "sampler: expected a table"),
        ('policy.evaluation = "mosaik"', "did you mean mosaic"),
        ("policy.leaves = 3", "c.toml: policy.leaves must be a power of two"),
        (
            'policy.evaluation = "mosaic"\npolicy.batch_leaves = 32\npolicy.context_leaves = 4',
            "at most 64 leaves",
        ),
        ("policy.vocab_block = 0", "policy.vocab_block must be at least 1, got 0"),
        ("policy.kv_segment = 0", "policy.kv_segment must be a multiple of kv_block .64., got 0"),
        ("policy.l2_epsilon = nan", "policy.l2_epsilon must be finite"),
        ("mesh.data = 0", "mesh.data must be at least 1, got 0"),
        ("trainer.keep_checkpoints = 0", "trainer.keep_checkpoints must be at least 1"),
        ("trainer.learning_rate = inf", "trainer.learning_rate must be finite, got inf"),
        ("trainer.epsilon = nan", "trainer.epsilon must be finite"),
        ("algorithm.dual_clip = nan", "algorithm.dual_clip must be above 1"),
        ("sampler.temperature = nan", "temperature"),
        ("sampler.temperature = inf", "finite"),
        ("sampler.top_p = 0.0", "top_p"),
        ("algorithm.prompts_per_step = 33", "multiple of"),
        ("trainer.microbatch_tokens = 4096", "hold the longest sequence"),
        ("model.hidden_size = 8", "model.vocab_size is missing"),
        ("data.reward = 'regex'", "reward_pattern"),
        ("data.source = 'jsonl'", "needs a path"),
    ],
)
def test_wrong_values_are_named(line, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, f'checkpoint = "x"\n{line}\n'))


def test_the_command_line_is_told_from_the_file(tmp_path):
    good, nan = write(tmp_path, 'checkpoint = "x"\n'), {"sampler.temperature": float("nan")}
    with pytest.raises(ConfigError) as error:
        load(good, nan)
    assert str(error.value) == "command line: sampler.temperature must be at least 0, got nan"
    bad = write(tmp_path, 'checkpoint = "x"\n[mesh]\ndata = 0\n')
    with pytest.raises(ConfigError, match="c.toml: mesh.data must be at least 1"):
        load(bad, {"steps": 3})
    with pytest.raises(ConfigError, match="c.toml with the command line: .*temperature"):
        load(bad, nan)
    assert load(bad, {"mesh.data": 1}).mesh.data == 1


def test_syntax_errors_and_missing_files_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="c.toml"):
        load(write(tmp_path, "a = = 3"))
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="checkpoint or a .model. section"):
        load()


def parse(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_arguments(parser)
    return parse_arguments(parser, words)


def test_command_line_overrides():
    namespace, overrides = parse(
        "--config", "c.toml", "--sampler.max-tokens", "64", "--trainer.microbatch_tokens=1024",
        "--sampler.stop", "a b", "c", "--trainer.remat", "false",
        "--data.task-config", '{"max_terms": 3}', "--model.bos-token-id", "none",
        "--contract.on-difference", "warn", "--steps", "3",
    )  # fmt: skip
    assert vars(namespace) == {"config": "c.toml"}
    config = load(CONFIGS / "tiny.toml", overrides)
    assert config.sampler.max_tokens == 64 and config.trainer.microbatch_tokens == 1024
    assert config.sampler.stop == ("a b", "c") and not config.trainer.remat
    assert config.data.task_config == {"max_terms": 3} and config.steps == 3
    assert config.contract.on_difference == "warn"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampler.max-tokns", "3"], "did you mean --sampler.max-tokens?"),
        (["--sampler.max-tokens", "many"], "--sampler.max-tokens: expected integer"),
        (["--policy.evaluation", "x"], "expected reference or mosaic"),
        (["--trainer.remat", "maybe"], "expected true or false"),
    ],
)
def test_command_line_errors(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


def test_every_leaf_has_a_help_text_and_survives_the_command_line():
    for name, _, text in leaves(RunConfig):
        assert text or name.startswith("mesh."), name
    names = {name for name, _, _ in leaves(RunConfig)}
    assert {"seed", "sampler.top_p", "model.layer_types", "policy.chunk"} <= names


def test_strings_that_need_escapes_round_trip():
    config = DataConfig(system_prompt='a "b"\n\t\\ é \x7f \x01', task_config={"a b": [1.5, True]})
    again = build(DataConfig, tomllib.loads(to_toml(config)))
    assert again == config


def test_resolve_model(tmp_path):
    config = load(CONFIGS / "tiny.toml")
    assert resolve_model(config) is config.model
    hf = config.model.to_hf() | {"eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    same = dataclasses.replace(config, checkpoint=str(tmp_path))
    assert resolve_model(same).eos_token_ids == (7,)
    assert resolve_model(dataclasses.replace(same, model=None)).hidden_size == 64
    (tmp_path / "config.json").write_text(json.dumps(hf | {"num_experts": 16}))
    with pytest.raises(ValueError, match="num_experts is 16 there and 8 here"):
        resolve_model(same)


def test_sections_are_hashable():
    assert hash(SamplerConfig()) == hash(SamplerConfig())
