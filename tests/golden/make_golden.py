"""Make tiny random checkpoints in Hugging Face format with the logits that `transformers` gives.

The peer here is transformers' own PyTorch model, run in float32 on the CPU. Each case is a folder
with config.json, model.safetensors and expected.npz:
    tokens  int32 [B, T]     token ids, every row a full sequence (no padding)
    logits  float32 [B, T, V]  next-token logits at every position
    greedy  int32 [B, G]     G greedy tokens that follow each row, decoded with the cache

usage: python make_golden.py OUT_DIR   (needs torch and transformers >= 5.10)
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5MoeForConditionalGeneration

COMMON = dict(
    vocab_size=160,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
MOE = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
HYBRID = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    full_attention_interval=4,
    partial_rotary_factor=0.25,
)
CASES = {
    "qwen3": dict(model_type="qwen3", num_hidden_layers=2, **COMMON),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        num_hidden_layers=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **COMMON,
        **MOE,
    ),
    "qwen3_next": dict(
        model_type="qwen3_next",
        num_hidden_layers=4,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **COMMON,
        **MOE,
        **HYBRID,
    ),
    "qwen3_5": dict(model_type="qwen3_5_text", num_hidden_layers=4, **COMMON, **HYBRID),
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe_text",
        num_hidden_layers=4,
        shared_expert_intermediate_size=32,
        **COMMON,
        **MOE,
        **HYBRID,
    ),
}
CASES["qwen3_5_moe_published"] = dict(
    CASES["qwen3_5_moe"], model_type="qwen3_5_moe", num_hidden_layers=4
)


def make(
    name: str,
    settings: dict,
    out: pathlib.Path,
    seed: int,
    batch: int,
    tokens: int,
    steps: int,
    shard="1GB",
) -> None:
    torch.manual_seed(seed)
    settings = dict(settings)
    if (
        settings["model_type"] == "qwen3_5_moe"
    ):  # the published form: a text tower inside a vision-language model
        text = {key: value for key, value in settings.items() if key != "model_type"}
        vision = dict(
            depth=1,
            hidden_size=32,
            intermediate_size=32,
            num_heads=2,
            out_hidden_size=64,
            num_position_embeddings=16,
        )
        config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision)
        model = Qwen3_5MoeForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    else:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    vocab_size = settings["vocab_size"]
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("A_log"):
                value.copy_(torch.empty_like(value).uniform_(0.05, 4.0).log())
            elif key.endswith("dt_bias"):
                value.copy_(torch.randn_like(value))
            elif value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5)
        ids = torch.randint(0, vocab_size, (batch, tokens))
        logits = model(input_ids=ids, use_cache=False).logits
        greedy = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else tokens equal to pad_token_id are masked
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )[:, tokens:]
    folder = out / name
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=ids.numpy().astype(np.int32),
        logits=logits.numpy().astype(np.float32),
        greedy=greedy.numpy().astype(np.int32),
    )
    print(
        name, tuple(logits.shape), f"{logits.std():.3f}", sum(p.numel() for p in model.parameters())
    )


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1])
    for index, (name, settings) in enumerate(CASES.items()):
        shard = (
            "400KB" if name.endswith("published") else "1GB"
        )  # the published form comes in shards with an index
        make(name, settings, target, seed=index, batch=2, tokens=70, steps=8, shard=shard)
