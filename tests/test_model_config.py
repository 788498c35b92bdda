import dataclasses

import pytest

from isojax.models.config import MODEL_TYPES, ModelConfig

BASE = dict(
    vocab_size=160,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = dict(shared_expert_intermediate_size=32)
EXTRA = {
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_next": MOE | SHARED,
    "qwen3_5": {},
    "qwen3_5_moe": MOE | SHARED,
}


def hf(model_type: str, **changes):
    return {"model_type": model_type, **BASE, **EXTRA[model_type], **changes}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_round_trip(model_type):
    config = ModelConfig.from_hf(hf(model_type, eos_token_id=[3, 5], rope_theta=1e6))
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert hash(config) == hash(dataclasses.replace(config))
    assert config.rope_theta == 1e6 and config.eos_token_ids == (3, 5)


def test_hybrid_pattern_and_rotary():
    config = ModelConfig.from_hf(hf("qwen3_5_moe", num_hidden_layers=8))
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert (config.period, config.periods) == (4, 2)
    assert config.rotary_dim == 8
    assert config.attention_output_gate and config.zero_centered_norm
    assert config.mlp_layer_types == ("sparse",) * 8


def test_dense_model_has_period_one():
    config = ModelConfig.from_hf(hf("qwen3"))
    assert (config.period, config.periods, config.rotary_dim) == (1, 4, 32)
    assert not config.attention_output_gate and not config.zero_centered_norm


def test_sparse_layers_follow_step_and_exceptions():
    config = ModelConfig.from_hf(hf("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]))
    assert config.mlp_layer_types == ("dense", "sparse", "dense", "dense")
    assert config.period == 4
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_norm_topk_prob_defaults_follow_the_model_type():
    assert not ModelConfig.from_hf(hf("qwen3_moe")).norm_topk_prob
    assert ModelConfig.from_hf(hf("qwen3_next")).norm_topk_prob
    assert ModelConfig.from_hf(hf("qwen3_5_moe", norm_topk_prob=False)).norm_topk_prob


def test_published_form():
    inner = hf("qwen3_5_moe", tie_word_embeddings=True)
    inner["model_type"] = "qwen3_5_moe_text"
    inner["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    }  # fmt: skip
    outer = {"model_type": "qwen3_5_moe", "text_config": inner, "vision_config": {"hidden_size": 8}}
    config = ModelConfig.from_hf(outer | {"tie_word_embeddings": False})
    assert config.hidden_size == 64 and config.rotary_dim == 16 and config.rope_theta == 1e7
    assert not config.tie_word_embeddings
    assert ModelConfig.from_hf(outer).tie_word_embeddings
    assert config.to_hf()["model_type"] == "qwen3_5_moe_text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attention_bias=True), "attention_bias"),
        (dict(use_sliding_window=True), "sliding-window"),
        (dict(layer_types=["sliding_attention"] * 4), "sliding-window"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (dict(rope_scaling={"type": "linear", "factor": 4.0}), "linear"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(num_key_value_heads=3), "multiple of"),
        (dict(num_experts=None), "num_experts is missing"),
        (dict(num_experts_per_tok=9), "exceeds"),
        (dict(model_type="llama"), "'llama' is not supported"),
        (dict(layer_types=["linear_attention"] * 4), "no linear_attention"),
        (dict(layer_types=["full_attention"] * 3), "do not divide"),
    ],
)
def test_refusals_name_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf("qwen3_moe") | changes)


def test_all_problems_in_one_error():
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({"model_type": "qwen3", "attention_bias": True, "hidden_size": 8})
    for part in ("attention_bias", "vocab_size is missing", "num_hidden_layers is missing"):
        assert part in str(error.value)


def test_pattern_is_repeated():
    config = ModelConfig.from_hf(hf("qwen3_5"))
    longer = dataclasses.replace(config, num_layers=8, mlp_layer_types=("dense",))
    assert len(longer.layer_types) == 8 and longer.period == 4
