"""What a sequence leaves behind for its later tokens: pages of keys and values, slots of state.

Arrays have a leading axis of layers of their kind. The sampler keeps one entry a layer; the
trainer, whose sequences are whole, keeps one entry that every layer reuses.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from isojax.mesh import DATA, HEADS, Layout
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy
from isojax.ops import gated_delta


@partial(register_dataclass, data_fields=["keys", "values", "conv", "delta"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """Pools of one data rank, or of all, concatenated along the axis of pages or slots.

    keys, values [La, pages, page, Hkv, D] in the compute dtype: page p holds `page` consecutive
      positions of one sequence. None for a model without attention layers.
    conv [Lg, slots, width - 1, channels] in the compute dtype: the last inputs of the causal
    convolution.
    delta: state of the gated delta rule, see `ops/gated_delta.py`; every leaf is [Lg, slots, ...].
      conv and delta are None for a model without Gated DeltaNet layers.
    """

    keys: Any
    values: Any
    conv: Any
    delta: Any

    @property
    def pages(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]


def local_heads(heads: int, layout: Layout) -> int:
    """Heads that one rank works on: an equal share, or one copy where ranks outnumber heads."""
    return max(1, heads // layout.head_ranks)


def create(
    model: ModelConfig, policy: Policy, layout: Layout, *, pages: int, slots: int, per_layer: bool
) -> Cache:
    """A zero cache of one rank: `pages` pages of `policy.chunk` tokens and `slots` slots.

    per_layer: one entry a layer (sampler), or a single one that all layers reuse (trainer).
    """
    attention = sum(kind == "full_attention" for kind in model.layer_types)
    delta = model.num_layers - attention
    entries = (lambda n: n) if per_layer else (lambda n: min(n, 1))
    keys = values = conv = state = None
    if attention:
        heads = local_heads(model.num_key_value_heads, layout)
        shape = (entries(attention), pages, policy.chunk, heads, model.head_dim)
        keys, values = jnp.zeros(shape, policy.dtype), jnp.zeros(shape, policy.dtype)
    if delta:
        key_heads = model.linear_num_key_heads // layout.head_ranks
        value_heads = model.linear_num_value_heads // layout.head_ranks
        key_dim, value_dim = model.linear_key_head_dim, model.linear_value_head_dim
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        width = model.linear_conv_kernel_dim
        conv = jnp.zeros((entries(delta), slots, width - 1, channels), policy.dtype)
        state = gated_delta.init_state(
            entries(delta), slots, key_heads, value_heads, key_dim, value_dim, policy
        )
    return Cache(keys, values, conv, state)


def specs(cache: Cache) -> Any:
    """PartitionSpecs of a cache's global arrays: pages and slots over "data", heads dealt to
    ranks.

    The same tree as `cache`, with a PartitionSpec for every array; a rank's block is what `create`
    makes.
    """
    tree: dict[str, Any] = {
        "keys": PartitionSpec(None, DATA, None, HEADS),
        "values": PartitionSpec(None, DATA, None, HEADS),
        "conv": PartitionSpec(None, DATA, None, HEADS),
        "delta": gated_delta.state_specs(cache.delta) if cache.delta is not None else None,
    }
    return Cache(**{k: v if getattr(cache, k) is not None else None for k, v in tree.items()})


def copy(
    cache: Cache,
    from_pages: jax.Array,
    to_pages: jax.Array,
    from_slots: jax.Array,
    to_slots: jax.Array,
) -> Cache:
    """Copy pages and slots in every layer: what a sample inherits from a prompt that others share.

    Index arrays are int32 [n]; an entry whose target is out of range copies nothing.
    """
    pages = lambda x: x.at[:, to_pages].set(x[:, from_pages], mode="drop")  # noqa: E731
    slots = lambda x: x.at[:, to_slots].set(x[:, from_slots], mode="drop")  # noqa: E731
    return Cache(
        keys=jax.tree.map(pages, cache.keys),
        values=jax.tree.map(pages, cache.values),
        conv=jax.tree.map(slots, cache.conv),
        delta=jax.tree.map(slots, cache.delta),
    )
