"""Qwen3, dense: attention with normalised queries and keys, gated MLP.

`tensors` maps parameters to the tensors of a Hugging Face checkpoint, see `mapping`.
"""

from isojax.models.config import ModelConfig
from isojax.models.mapping import Tensors, linear, under, whole

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."

MODEL: Tensors = {
    "embed": whole("model.embed_tokens.weight"),
    "norm": whole("model.norm.weight"),
    "lm_head": linear("lm_head.weight"),
    "input_norm": whole(LAYER + "input_layernorm.weight"),
    "post_norm": whole(LAYER + "post_attention_layernorm.weight"),
}


def attention() -> Tensors:
    """Attention without an output gate."""
    return {
        "q": linear(ATTENTION + "q_proj.weight"),
        "k": linear(ATTENTION + "k_proj.weight"),
        "v": linear(ATTENTION + "v_proj.weight"),
        "o": linear(ATTENTION + "o_proj.weight"),
        "q_norm": whole(ATTENTION + "q_norm.weight"),
        "k_norm": whole(ATTENTION + "k_norm.weight"),
    }


def mlp(prefix: str) -> Tensors:
    """A gated MLP whose tensors are named PREFIXgate_proj.weight, ..."""
    return {
        "gate": linear(prefix + "gate_proj.weight"),
        "up": linear(prefix + "up_proj.weight"),
        "down": linear(prefix + "down_proj.weight"),
    }


def tensors(config: ModelConfig) -> Tensors:
    """Where each parameter of a layer, and of the model, stands in a checkpoint."""
    return MODEL | under("attn", attention()) | under("mlp", mlp(MLP))
