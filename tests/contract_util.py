"""Settings of small runs whose contracts are quick to build, and faults to plant."""

import dataclasses

import jax
import jax.numpy as jnp

from isojax.config import (
    AlgorithmConfig,
    DataConfig,
    RunConfig,
    SamplerConfig,
    TrainerConfig,
)
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy

DENSE = ModelConfig(
    model_type="qwen3", num_layers=2, vocab_size=96, hidden_size=32, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rotary_dim=8, intermediate_size=48,
)  # fmt: skip
HYBRID = dataclasses.replace(
    DENSE, model_type="qwen3_5_moe", num_layers=4, mlp_layer_types=("sparse",), num_experts=4,
    layer_types=("linear_attention", "full_attention"), num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip


def run_config(model: ModelConfig, **changed) -> RunConfig:
    """Settings of a run of short sequences; `changed` replaces fields."""
    config = RunConfig(
        model=model,
        sampler=SamplerConfig(max_tokens=64, max_sequences=8, max_batch_tokens=256),
        trainer=TrainerConfig(microbatch_tokens=256, minibatch_prompts=4),
        algorithm=AlgorithmConfig(prompts_per_step=4, overlong_buffer=4),
        data=DataConfig(max_prompt_tokens=128),
    )
    return dataclasses.replace(config, **changed)


def swiglu_that_counts_rows(gate: jax.Array, up: jax.Array, *, policy: Policy) -> jax.Array:
    """A planted fault: the op `swiglu`, with another rounding where there are few rows."""

    def iso_swiglu(gate, up):
        out = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        if gate.shape[0] <= 8:
            out = jax.nn.silu(gate).astype(jnp.float32) * up.astype(jnp.float32)
        return out.astype(gate.dtype)

    return jax.jit(iso_swiglu)(gate, up)


def swiglu_that_sees_gradients(gate: jax.Array, up: jax.Array, *, policy: Policy) -> jax.Array:
    """A planted fault: the op `swiglu`, with another rounding where a gradient is asked for."""

    @jax.custom_vjp
    def run(gate, up):
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    def iso_swiglu(gate, up):
        return run(gate, up)

    run.defvjp(
        lambda a, b: (jax.nn.silu(a) * b, (a, b)), lambda saved, d: (d * saved[1], d * saved[0])
    )
    return jax.jit(iso_swiglu)(gate, up)
