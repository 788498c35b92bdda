"""Qwen3-Next: Gated DeltaNet between gated attention layers, experts and a shared expert.

Each key head's queries, keys, values and output gates stand together in one projection, and so do
the b and a of its value heads; each attention head's query stands before its gate.
"""

from isojax.models import qwen3, qwen3_moe
from isojax.models.config import ModelConfig
from isojax.models.mapping import Tensors, fused_convolution, fused_linear, linear, under, whole

DELTA = qwen3.LAYER + "linear_attn."
SHARED = qwen3.MLP + "shared_expert"


def gated_attention(config: ModelConfig) -> Tensors:
    """Attention with an output gate: each head's query, then its gate."""
    heads = (config.head_dim, config.head_dim)
    q, gate = fused_linear(qwen3.ATTENTION + "q_proj.weight", heads)
    return qwen3.attention() | {"q": q, "gate": gate}


def gated_delta(config: ModelConfig) -> Tensors:
    """What Gated DeltaNet layers share, whatever the form of their input projections."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    conv_q, conv_k, conv_v = fused_convolution(DELTA + "conv1d.weight", (key, key, value))
    return {
        "conv_q": conv_q,
        "conv_k": conv_k,
        "conv_v": conv_v,
        "A_log": whole(DELTA + "A_log"),
        "dt_bias": whole(DELTA + "dt_bias"),
        "norm": whole(DELTA + "norm.weight"),
        "out": linear(DELTA + "out_proj.weight"),
    }


def grouped_projections(config: ModelConfig) -> Tensors:
    """The input projections, grouped by key head."""
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, ratio * config.linear_value_head_dim
    q, k, v, z = fused_linear(DELTA + "in_proj_qkvz.weight", (key, key, value, value))
    b, a = fused_linear(DELTA + "in_proj_ba.weight", (ratio, ratio))
    return {"q": q, "k": k, "v": v, "z": z, "b": b, "a": a}


def shared_and_routed(config: ModelConfig) -> Tensors:
    """Experts, and the one that every token visits, behind a gate."""
    return (
        qwen3_moe.routed(config)
        | under("shared", qwen3.mlp(SHARED + "."))
        | {"shared_gate": linear(SHARED + "_gate.weight")}
    )


def tensors(config: ModelConfig) -> Tensors:
    """Where each parameter of a layer, and of the model, stands in a checkpoint."""
    return (
        qwen3.MODEL
        | under("attn", gated_attention(config))
        | under("gdn", gated_delta(config) | grouped_projections(config))
        | under("mlp", qwen3.mlp(qwen3.MLP))
        | under("moe", shared_and_routed(config))
    )
