"""What a run's configuration says of its rollout engine, as the engine takes it."""

from typing import Any

from jax.sharding import Mesh

from isojax.config import RunConfig
from isojax.models.config import ModelConfig
from isojax.sampler.config import EngineConfig
from isojax.sampler.executor import Executor


def engine_config(config: RunConfig) -> EngineConfig:
    """The engine's sizes."""
    s = config.sampler
    return EngineConfig(
        max_model_len=config.max_length,
        max_sequences=s.max_sequences,
        max_batch_tokens=s.max_batch_tokens,
        pages=s.pages,
        bucket_sizes=s.bucket_sizes,
    )


def executor(config: RunConfig, model: ModelConfig, mesh: Mesh, params: Any) -> Executor:
    """The engine's device side, for weights that lie on the mesh."""
    sizes = engine_config(config)
    return Executor(
        params,
        model=model,
        policy=config.policy,
        layout=config.mesh,
        mesh=mesh,
        pages=sizes.pool(config.policy.chunk),
        slots=sizes.max_sequences,
    )
