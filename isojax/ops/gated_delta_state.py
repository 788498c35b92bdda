"""What a sequence of Gated DeltaNet leaves behind for its later tokens."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from isojax.mesh import DATA, HEADS
from isojax.numerics.policy import Policy


@partial(
    register_dataclass,
    data_fields=["state", "operand", "keys", "inverse", "residual", "update", "decay"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a sequence leaves for its later tokens; every leaf is [layers, slots, heads, ...].

    state [.., Hv, K, V] float32: S at the start of the open chunk; operand: the same in the
    rounding dtype, which is what products read (decode reads S for every token and writes it once a
    chunk).
    Rows of the open chunk, of which those before the next position mean something: keys
    [.., Hk, C, K] in the compute dtype, inverse [.., Hv, C, C] (T), residual (r) and update (d)
    [.., Hv, C, V] in the rounding dtype, decay [.., Hv, C] float32 (G).
    """

    state: jax.Array
    operand: jax.Array
    keys: jax.Array
    inverse: jax.Array
    residual: jax.Array
    update: jax.Array
    decay: jax.Array


def init_state(
    layers: int, slots: int, Hk: int, Hv: int, K: int, V: int, policy: Policy
) -> DeltaState:
    """Zero state of `layers` layers and `slots` slots for Hk key heads of K and Hv value heads of
    V."""
    lead, chunk = (layers, slots), policy.chunk
    return DeltaState(
        state=jnp.zeros((*lead, Hv, K, V), jnp.float32),
        operand=jnp.zeros((*lead, Hv, K, V), policy.delta),
        keys=jnp.zeros((*lead, Hk, chunk, K), policy.dtype),
        inverse=jnp.zeros((*lead, Hv, chunk, chunk), policy.delta),
        residual=jnp.zeros((*lead, Hv, chunk, V), policy.delta),
        update=jnp.zeros((*lead, Hv, chunk, V), policy.delta),
        decay=jnp.zeros((*lead, Hv, chunk), jnp.float32),
    )


def state_specs(state: DeltaState) -> DeltaState:
    """PartitionSpecs of a state's global arrays: slots over "data", heads dealt to ranks."""
    return jax.tree.map(lambda _: PartitionSpec(None, DATA, HEADS), state)
