"""Qwen3.5, dense: the layers of Qwen3-Next with an MLP, their input projections stored apart."""

from isojax.models import qwen3, qwen3_next
from isojax.models.config import ModelConfig
from isojax.models.mapping import Tensors, fused_linear, linear, under


def gated_delta(config: ModelConfig) -> Tensors:
    """One projection of all queries, all keys, then all values; z, b and a have their own."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    q, k, v = fused_linear(qwen3_next.DELTA + "in_proj_qkv.weight", (key, key, value))
    return qwen3_next.gated_delta(config) | {
        "q": q,
        "k": k,
        "v": v,
        "z": linear(qwen3_next.DELTA + "in_proj_z.weight"),
        "b": linear(qwen3_next.DELTA + "in_proj_b.weight"),
        "a": linear(qwen3_next.DELTA + "in_proj_a.weight"),
    }


def tensors(config: ModelConfig) -> Tensors:
    """Where each parameter of a layer, and of the model, stands in a checkpoint."""
    return (
        qwen3.MODEL
        | under("attn", qwen3_next.gated_attention(config))
        | under("gdn", gated_delta(config))
        | under("mlp", qwen3.mlp(qwen3.MLP))
    )
