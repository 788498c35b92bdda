"""Qwen3.5 with experts: the dense model, experts and a shared expert in place of the MLP."""

from isojax.models import qwen3_5, qwen3_next
from isojax.models.config import ModelConfig
from isojax.models.mapping import Tensors, under


def tensors(config: ModelConfig) -> Tensors:
    """Where each parameter of a layer, and of the model, stands in a checkpoint."""
    return qwen3_5.tensors(config) | under("moe", qwen3_next.shared_and_routed(config))
