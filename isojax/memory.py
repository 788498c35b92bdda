"""What a run keeps in the memory of one device, from its settings alone."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from isojax import cache as caches
from isojax.config import RunConfig, resolve_model
from isojax.mesh import CONTEXT, DATA, MODEL, Layout
from isojax.models.params import parameters
from isojax.sampler.settings import engine_config
from isojax.trainer import sharding
from isojax.trainer.sharding import Placement

_FLOAT32 = 4


def plan(config: RunConfig) -> dict[str, dict[str, int]]:
    """Bytes on one device: {"always", "rollout", "training call": {what: bytes}}.

    "always" is there in both phases. Exact for arrays that live through a phase; of a training call
    the large arrays that the program is known to make are counted, not what XLA adds to them.

    Raises:
      ValueError: if the mesh does not suit the model.
    """
    model, policy, layout = resolve_model(config), config.policy, config.mesh
    placed = jax.tree.leaves(sharding.placements(model, policy, layout), is_leaf=_is_placement)
    described = jax.tree.leaves(parameters(model, policy, layout))
    size = policy.dtype.itemsize
    state = _FLOAT32 * sum(_local(at, at.state, layout) for at in placed)
    always = {
        "weights": sum(
            _local(at, at.param, layout) * jnp.dtype(p.dtype).itemsize
            for at, p in zip(placed, described, strict=True)
        ),
        "master weights": state,
        "moments": 2 * state,
    }
    sizes = engine_config(config)
    pools = jax.eval_shape(
        lambda: caches.create(
            model, policy, layout, pages=sizes.pool(policy.chunk), slots=sizes.max_sequences,
            per_layer=True,
        )
    )  # fmt: skip
    rollout = {
        "keys and values": _bytes((pools.keys, pools.values)),
        "states of sequences": _bytes((pools.conv, pools.delta)),
    }
    rows = policy.row_leaves // layout.row_ranks * config.trainer.microbatch_tokens
    stream = rows // layout.stream_ranks * layout.context * model.hidden_size * size
    leaf = model.vocab_size // policy.vocab_leaves
    training = {
        "gradients, summed over calls": state,
        "gradients of a call": _FLOAT32 * sum(_local(at, at.param, layout) for at in placed),
        "rows of the residual stream": stream * model.num_layers,
        "logits of a vocabulary leaf": rows * leaf * size,
    }
    if model.num_experts:
        slots = rows * layout.row_ranks * model.num_experts_per_tok
        training["rows of one layer's experts"] = slots * 3 * model.hidden_size * size
        kept = slots * 2 * model.moe_intermediate_size * _FLOAT32
        training["kept products of one layer's experts"] = kept
    return {"always": always, "rollout": rollout, "training call": training}


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _local(at: Placement, spec: PartitionSpec, layout: Layout) -> int:
    """Elements of one rank."""
    ranks = {DATA: layout.data, CONTEXT: layout.context, MODEL: layout.model}
    cut = (axis for names in sharding.axis_names(spec, len(at.shape)) for axis in names)
    return math.prod(at.shape) // math.prod(ranks[axis] for axis in cut)


def _is_placement(x: Any) -> bool:
    return isinstance(x, Placement)


def table(parts: dict[str, dict[str, int]]) -> Iterator[str]:
    """Lines of GiB, and the sums of the two phases."""
    gib = 2.0**30
    for part, items in parts.items():
        yield f"{part}:"
        yield from (f"  {what:34} {size / gib:9.3f} GiB" for what, size in items.items())
    always = sum(parts["always"].values())
    for part in ("rollout", "training call"):
        yield f"{part + ', all told':36} {(always + sum(parts[part].values())) / gib:9.3f} GiB"
