"""The device side of the engine: weights, cache, and one compiled step for each bucket."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isojax import cache as caches
from isojax.batch import Bucket, pad_rows
from isojax.cache import Cache
from isojax.forward import forward, head
from isojax.mesh import DATA, Layout
from isojax.models.config import ModelConfig
from isojax.numerics.collectives import all_context_rows, gather_rows
from isojax.numerics.policy import Policy
from isojax.ops.logprob import logits_logprob, scaled_logits
from isojax.sampler.inputs import StepInputs, pack, unpack
from isojax.sampler.sampling import sample
from isojax.sampler.scheduler import Copies

# entries of one copy call: bounds the memory of the slots in flight
_COPY_WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a call drew, [ranks, S] in the order of each rank's sequences.

    tokens int32; logprobs, thresholds float32, see `request.Completion`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    thresholds: np.ndarray


class Drawn:
    """What a call draws, on its way from the device.

    bits: int32 [ranks, 3, S] on every device, as `rank_step` returns them.
    """

    def __init__(self, bits: jax.Array) -> None:
        self.bits = bits
        bits.copy_to_host_async()

    def wait(self) -> Sampled:
        """The call's end."""
        tokens, logprobs, thresholds = np.moveaxis(np.asarray(self.bits), 1, 0)
        return Sampled(tokens, logprobs.view(np.float32), thresholds.view(np.float32))


def rank_step(
    params: Any,
    cache: Cache,
    packed: jax.Array,
    *,
    model: ModelConfig,
    policy: Policy,
    layout: Layout,
    bucket: Bucket,
) -> tuple[jax.Array, Cache]:
    """One call on one rank, inside `shard_map`: forward, then a token for every sequence.

    packed int32 [1, N], see `inputs.pack`. Returns (int32 [ranks, 3, S]: tokens, and the bit
    patterns of logprobs and thresholds, the same on every rank; cache).
    """
    inputs = unpack(packed[0], bucket)
    batch = pad_rows(inputs.batch, layout.stream_ranks)
    hidden, cache = forward(params, batch, cache, model=model, policy=policy, layout=layout)
    hidden = all_context_rows(gather_rows(hidden, layout), layout)
    z = scaled_logits(
        hidden[inputs.row], head(params), inputs.inverse_temperature, policy=policy, layout=layout
    )
    tokens, thresholds = sample(z, inputs.settings)
    logprobs, _ = logits_logprob(z, tokens, thresholds, policy=policy)
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in (logprobs, thresholds)]
    drawn = jnp.stack([tokens, *bits])[None]
    if layout.data > 1:
        drawn = lax.all_gather(drawn, DATA, tiled=True)
    return drawn, cache


class Executor:
    """Runs calls on the mesh. Weights are held by reference; the cache is its own.

    A call is started and not waited for, so the next one can be laid out, and started, while it
    runs. Every program is compiled ahead of time for its bucket; calling one never compiles.
    """

    def __init__(
        self,
        params: Any,
        *,
        model: ModelConfig,
        policy: Policy,
        layout: Layout,
        mesh: Mesh,
        pages: int,
        slots: int,
    ) -> None:
        """pages, slots: of each data rank."""
        self.params = params
        self.compiles = 0
        self._mesh, self._pages, self._slots = mesh, pages, slots
        self._step = partial(rank_step, model=model, policy=policy, layout=layout)
        self._make = partial(
            caches.create, model, policy, layout, pages=pages, slots=slots, per_layer=True
        )
        self._cache_specs = caches.specs(jax.eval_shape(self._make))
        self._param_specs = jax.tree.map(lambda p: p.sharding.spec, params)
        self._programs: dict[Hashable, Any] = {}
        self._cache: Cache | None = None

    def step(
        self, bucket: Bucket, ranks: Sequence[StepInputs], after: Drawn | None = None
    ) -> Drawn:
        """Start one call; `ranks` holds each data rank's inputs.

        after: the call before, of the same bucket. Sequence s of this call is then that of `after`,
        and reads the token that is drawn for it there, whatever `ranks` says.
        """
        packed = self._put(pack(list(ranks)))
        if after is not None:
            packed = self._run(("follow", bucket), self._follow, packed, after.bits)
        arguments = (self.params, self.cache, packed)
        bits, self._cache = self._run(bucket, partial(self.jitted, bucket), *arguments)
        return Drawn(bits)

    def copy(self, ranks: Sequence[Copies]) -> None:
        """Copy pages and slots, each data rank its own."""
        most = max(max(len(c.pages), len(c.slots)) for c in ranks)
        for at in range(0, most, _COPY_WIDTH):
            index = np.zeros((len(ranks), 4, _COPY_WIDTH), np.int32)
            index[:, 1], index[:, 3] = self._pages, self._slots  # out of range: copies nothing
            for rank, copies in enumerate(ranks):
                for row, pairs in ((0, copies.pages), (2, copies.slots)):
                    for i, pair in enumerate(pairs[at : at + _COPY_WIDTH]):
                        index[rank, row : row + 2, i] = pair
            packed = self._put(index)
            self._cache = self._run("copy", self._copy, self.cache, packed)

    @property
    def cache(self) -> Cache:
        """The pools, allocated on first use and after `release` or a call that did not return."""
        if self._cache is None or any(x.is_deleted() for x in jax.tree.leaves(self._cache)):
            make = self._shard(self._make, (), self._cache_specs)
            self._cache = jax.jit(make)()
        return self._cache

    def release(self) -> None:
        """Free the cache's memory."""
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()
        self._cache = None

    def _shard(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _put(self, x: np.ndarray) -> jax.Array:
        """A global array with ranks over "data"; every process holds the same x."""
        sharding = NamedSharding(self._mesh, PartitionSpec(DATA))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def _run(self, name: Hashable, make: Callable[[], Any], *arguments: Any) -> Any:
        """Call a program, which is compiled the first time that its name is met."""
        if name not in self._programs:
            self._programs[name] = make().lower(*arguments).compile()
            self.compiles += 1
        return self._programs[name](*arguments)

    def jitted(self, bucket: Bucket) -> Any:
        """The step of a bucket, (params, cache, packed) -> (drawn, cache)."""
        body = partial(self._step, bucket=bucket)
        in_specs = (self._param_specs, self._cache_specs, PartitionSpec(DATA))
        step = self._shard(body, in_specs, (PartitionSpec(), self._cache_specs))
        return jax.jit(step, donate_argnums=1)

    def abstract_cache(self) -> Cache:
        """Shapes, dtypes and shardings of the pools."""
        shapes = jax.eval_shape(self._shard(self._make, (), self._cache_specs))
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec)
            ),
            shapes,
            self._cache_specs,
        )

    def _copy(self) -> Any:
        """(cache, index) -> cache, see `copy`."""

        def body(cache: Cache, index: jax.Array) -> Cache:
            return caches.copy(cache, *index[0])

        in_specs = (self._cache_specs, PartitionSpec(DATA))
        return jax.jit(self._shard(body, in_specs, self._cache_specs), donate_argnums=0)

    def _follow(self) -> Any:
        """(packed, bits of the call before) -> packed with the tokens that were drawn there."""

        def body(packed: jax.Array, bits: jax.Array) -> jax.Array:
            drawn = bits[lax.axis_index(DATA), 0]
            return packed.at[0, : drawn.shape[0]].set(drawn)  # tokens lie first, see `inputs.pack`

        in_specs = (PartitionSpec(DATA), PartitionSpec())
        return jax.jit(self._shard(body, in_specs, PartitionSpec(DATA)), donate_argnums=0)
