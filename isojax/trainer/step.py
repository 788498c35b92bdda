"""One optimizer step: a minibatch in microbatches, then AdamW."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.params import parameters
from isojax.numerics.policy import Policy
from isojax.trainer import optimizer
from isojax.trainer.call import ROWS, all_rows, put, row_logprobs, shard
from isojax.trainer.gradients import add_gradients
from isojax.trainer.loss import STATS, PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.packing import Example, TrainBatch, pack
from isojax.trainer.score import Scored, by_example
from isojax.trainer.sharding import Placement, placements


@partial(register_dataclass, data_fields=["params", "master", "optimizer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: weights in their dtypes, what the forward reads (sampler and trainer alike).
    master: float32 weights. optimizer: optax state. Both also cut over "data"."""

    params: Any
    master: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured over its minibatch.

    loss: mean over tokens. grad_norm: before clipping. learning_rate: that was applied.
    totals: sums over tokens of the columns of `loss.STATS`, by name.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    totals: dict[str, float]

    @property
    def tokens(self) -> float:
        """How many took part."""
        return self.totals["tokens"]

    @property
    def finite(self) -> bool:
        """Whether the gradient was; if not, no weight was changed."""
        return bool(np.isfinite(self.grad_norm))

    @property
    def negative_logp(self) -> float:
        """Mean over tokens: the cross-entropy, nats."""
        return self.totals["negative_logp"] / max(self.tokens, 1.0)

    @property
    def clip_fraction(self) -> float:
        """Share of tokens whose objective was clipped."""
        kinds = ("clipped_high", "clipped_low", "clipped_dual")
        return sum(self.totals[kind] for kind in kinds) / max(self.tokens, 1.0)


class Trainer:
    """Compiled training of one model on one mesh.

    microbatch_tokens: rows of one batch leaf in one call. longest: tokens of the longest sequence
    (default: unknown, a longer one than before then compiles anew). remat: recompute layers in the
    backward.
    """

    def __init__(
        self,
        model: ModelConfig,
        policy: Policy,
        layout: Layout,
        mesh: Mesh,
        adamw: AdamW,
        *,
        microbatch_tokens: int,
        remat: bool,
        longest: int | None = None,
    ) -> None:
        self.model, self.policy, self.layout, self.mesh = model, policy, layout, mesh
        self.adamw = adamw
        self.microbatch_tokens = microbatch_tokens
        self.remat = remat
        self.longest = longest
        described = parameters(model, policy, layout)
        self.placements = placements(model, policy, layout)
        param = jax.tree.map(lambda at: at.param, self.placements)
        blocks = jax.tree.map(lambda at: at.state, self.placements)
        placed = (self.placements, optimizer.like_state(adamw, self.placements))
        state = jax.tree.map(lambda at: at.state, placed[1])
        none = PartitionSpec()
        self.specs = TrainState(param, blocks, state)
        self._init = jax.jit(shard(self._rank_init, mesh, (param,), (blocks, state)))
        self._cast = jax.jit(
            lambda master: jax.tree.map(lambda p, m: m.astype(p.dtype), described, master),
            out_shardings=self.shardings(param),
        )
        self._placed = placed
        self.zeros = jax.jit(
            lambda: (
                jax.tree.map(lambda at: jnp.zeros(at.shape, jnp.float32), self.placements),
                jnp.zeros(1 + len(STATS), jnp.float32),
            ),
            out_shardings=self.shardings((blocks, none)),
        )
        self.add = jax.jit(
            lambda params, totals, batch, loss: shard(
                partial(self._rank_add, loss=loss),
                mesh,
                (param, (blocks, none), ROWS),
                ((blocks, none), none),
            )(params, totals, batch),
            static_argnums=3,
            donate_argnums=1,
        )
        self.update = jax.jit(
            shard(
                self._rank_update,
                mesh,
                (blocks, self.specs, none),
                (self.specs, none),
            ),
            donate_argnums=(0, 1),
        )

    def shardings(self, specs: Any) -> Any:
        """NamedShardings on this trainer's mesh from PartitionSpecs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def init(self, params: Any) -> TrainState:
        """A fresh optimizer for weights placed on the mesh by `isojax.models.params`."""
        return TrainState(params, *self._init(params))

    def abstract_state(self) -> tuple[Any, Any]:
        """Shapes, dtypes and shardings of (master weights, optimizer state)."""

        def like(at: Placement) -> jax.ShapeDtypeStruct:
            dtype = jnp.float32 if at.shape else jnp.int32  # the optimizer's counters
            return jax.ShapeDtypeStruct(
                at.shape, dtype, sharding=NamedSharding(self.mesh, at.state)
            )

        return jax.tree.map(like, self._placed)

    def from_master(self, master: Any, opt: Any) -> TrainState:
        """The state of these master weights, which rounded are the weights."""
        return TrainState(self._cast(master), master, opt)

    def step(
        self,
        state: TrainState,
        examples: Sequence[Example],
        loss: PolicyLoss,
        schedule: Schedule,
    ) -> tuple[TrainState, StepResult]:
        """One optimizer step over a minibatch; `state` is consumed.

        The loss is the mean over all predicted tokens of examples with weight, whichever rank or
        microbatch holds them. A minibatch without such tokens changes nothing.
        Nor does one whose gradient is not finite: see `StepResult.finite`.
        """
        tokens = sum(example.predicted for example in examples if example.weight)
        if not tokens:
            return state, StepResult(0.0, 0.0, 0.0, dict.fromkeys(STATS, 0.0))
        calls, _ = pack(
            examples,
            self.microbatch_tokens,
            self.policy,
            self.layout,
            scale=1.0 / tokens,
            longest=self.longest,
        )
        totals = self.zeros()
        for call in calls:
            totals, _ = self.add(state.params, totals, put(call, self.mesh), loss)
        gradients, sums = totals
        rate = schedule.rate(int(optimizer.count(state.optimizer)))
        state, norm = self.update(gradients, state, rate)
        sums, norm = jax.device_get((sums, norm))
        by_name = dict(zip(STATS, map(float, sums[1:]), strict=True))
        return state, StepResult(float(sums[0]), float(norm), float(rate), by_name)

    def logprobs(self, params: Any, examples: Sequence[Example], loss: PolicyLoss) -> list[Scored]:
        """What the forward inside the gradient's own program says of examples; no weight is moved.

        Raises:
          ValueError: if an example exceeds `microbatch_tokens`.
        """
        calls, placed = pack(
            examples, self.microbatch_tokens, self.policy, self.layout, longest=self.longest
        )
        totals, rows = self.zeros(), []
        for call in calls:
            totals, found = self.add(params, totals, put(call, self.mesh), loss)
            rows.append(jax.device_get(found))
        return by_example(rows, placed, examples)

    def _rank_init(self, params: Any) -> tuple[Any, Any]:
        return optimizer.init(self.adamw, params, self.placements, self.layout)

    def _rank_add(
        self, params: Any, totals: tuple[Any, jax.Array], batch: TrainBatch, loss: PolicyLoss
    ) -> tuple[tuple[Any, jax.Array], Any]:
        """Totals with this call's share, and its rows' log-probabilities as `Scorer` gives them."""

        def row_losses(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            full, kept = row_logprobs(
                params,
                batch,
                model=self.model,
                policy=self.policy,
                layout=self.layout,
                remat=self.remat,
            )
            losses, stats = loss(kept, batch)
            return losses, (stats, (full, kept))

        totals, rows = add_gradients(
            row_losses,
            params,
            totals,
            placements=self.placements,
            policy=self.policy,
            layout=self.layout,
        )
        return totals, tuple(all_rows(x, self.layout) for x in rows)

    def _rank_update(
        self, gradients: Any, state: TrainState, rate: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        master, opt, params, norm = optimizer.update(
            self.adamw,
            gradients,
            state.master,
            state.optimizer,
            state.params,
            rate,
            placements=self.placements,
            policy=self.policy,
            layout=self.layout,
        )
        return TrainState(params, master, opt), norm
