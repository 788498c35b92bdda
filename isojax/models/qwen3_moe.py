"""Qwen3 with experts: the dense model's attention, a router and experts in place of the MLP."""

from isojax.models import qwen3
from isojax.models.config import ModelConfig
from isojax.models.mapping import Tensors, experts, linear, under


def routed(config: ModelConfig) -> Tensors:
    """The router and its experts."""
    return {
        "router": linear(qwen3.MLP + "gate.weight"),
        **experts(qwen3.MLP + "experts", config.moe_intermediate_size),
    }


def tensors(config: ModelConfig) -> Tensors:
    """Where each parameter of a layer, and of the model, stands in a checkpoint."""
    return qwen3.tensors(config) | under("moe", routed(config))
