"""One training or scoring call on one rank: whole sequences through the one forward."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isojax import cache
from isojax.forward import forward, logprobs
from isojax.mesh import DATA, Layout
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy
from isojax.trainer.packing import TrainBatch

ROWS = PartitionSpec(DATA)


def row_logprobs(
    params: Any,
    batch: TrainBatch,
    *,
    model: ModelConfig,
    policy: Policy,
    layout: Layout,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 [T] of a rank's rows: full vocabulary, kept set."""
    rows = batch.ragged
    fresh = cache.create(
        model,
        policy,
        layout,
        pages=rows.piece_len.shape[0],  # a page per piece is enough
        slots=rows.length.shape[0],
        per_layer=False,
    )
    hidden, _ = forward(params, rows, fresh, model=model, policy=policy, layout=layout, remat=remat)
    return logprobs(
        params,
        hidden,
        batch.targets,
        batch.inverse_temperature,
        batch.threshold,
        policy=policy,
        layout=layout,
    )


def all_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """[T] of every data rank, laid end to end, on every rank (movement only)."""
    return x if layout.data == 1 else lax.all_gather(x, DATA, tiled=True)


def put(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """A call's global arrays onto the mesh, rows over "data"; the same arrays on every process."""
    sharding = NamedSharding(mesh, ROWS)

    def one(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, batch)


def shard(body: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` of a per-rank function.

    Its check of replication is off: it would finish gradients with psum, in an order of its own.
    """
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
