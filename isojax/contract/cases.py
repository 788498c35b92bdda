"""Every way a log-probability is produced: the very programs, lowered without a device.

Sampler and trainer are built on an abstract mesh with the shapes of their weights, and their own
jitted calls are traced: what is lowered here is what they run.
"""

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from isojax.batch import Bucket, RaggedBatch
from isojax.config import RunConfig, resolve_model
from isojax.contract.canonical import ContractError
from isojax.contract.stablehlo import Program
from isojax.mesh import CONTEXT, DATA, MODEL, Layout
from isojax.models.config import ModelConfig
from isojax.models.params import shapes
from isojax.numerics.policy import Policy
from isojax.sampler.config import buckets
from isojax.sampler.executor import Executor
from isojax.sampler.inputs import lay_out, pack, shape_of
from isojax.sampler.random import sample_key
from isojax.sampler.settings import engine_config
from isojax.trainer import settings
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.packing import TrainBatch, bucket_of
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer, TrainState

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
SCORE, FORWARD, RECOMPUTE = "train_score", "train_forward", "train_recompute"
STEP = "train_step"

# what each case is; the first six produce log-probabilities
CASES: dict[str, str] = {
    DECODE: "sampler, one token a sequence, state continued",
    PREFILL: "sampler, pieces of prompts, state continued; the program of mixed",
    MIXED: "sampler, pieces of prompts and single tokens together, state continued",
    SCORE: "trainer, whole sequences, fresh state, no gradient",
    FORWARD: "trainer, whole sequences, fresh state, activations kept for the backward",
    RECOMPUTE: "trainer, whole sequences, fresh state, activations recomputed in the backward",
    STEP: "trainer, backward and update",
}

# What the cases are written in, their ops aside. It brings rows to ops and tells them where they
# are; of such integers the text between ops shows nothing.
WRITTEN = (Executor, lay_out, sample_key, Scorer, Trainer)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the calls of one data rank, and its pool of pages and slots."""

    decode: Bucket
    mixed: Bucket
    train: Bucket
    pages: int
    slots: int


def probe(policy: Policy, scale: int, sequences: int) -> Sizes:
    """Sizes that only the contract uses: T, S, P and M are the same in every case.

    Ops on rows then have equal shapes in all of them, and what differs is what the case itself
    changes.
    """
    tokens = scale * policy.batch_leaves * policy.chunk
    pieces = tokens // policy.chunk + sequences
    whole = Bucket(tokens, sequences, pieces, pages=2 * scale + 1, piece_rows=policy.chunk)
    return Sizes(dataclasses.replace(whole, piece_rows=1), whole, whole, pieces, sequences)


# Two sizes with nothing in common but the layout's divisibility: what differs counts rows.
PROBES = ((3, 23), (5, 29))


def deployed(config: RunConfig, layout: Layout) -> Sizes:
    """The largest shapes that a run compiles."""
    engine = engine_config(config)
    chunk = config.policy.chunk
    shaped = buckets(engine, chunk)
    decode = [b for b in shaped if b.piece_rows == 1][-1]
    mixed = [b for b in shaped if b.piece_rows > 1][-1]
    rows, longest = config.trainer.microbatch_tokens, config.max_length
    full = [longest] * (rows // longest)
    train = bucket_of([full] * config.policy.batch_leaves, rows, layout.data, longest, chunk)
    return Sizes(decode, mixed, train, engine.pool(chunk), engine.max_sequences)


class Lowering:
    """Lowers the cases of a model on one mesh, for a platform that need not be here."""

    def __init__(self, config: RunConfig, layout: Layout, platform: str) -> None:
        self.model: ModelConfig = resolve_model(config)
        self.policy, self.layout = config.policy, layout
        self.config = dataclasses.replace(config, mesh=layout)
        if platform not in ("cpu", "cuda"):
            raise ContractError(f"platform must be cpu or cuda, not {platform!r}")
        if platform == "cpu" and config.policy.evaluation == "mosaic":
            raise ContractError(
                'policy.evaluation = "mosaic" has no CPU program: use --platform cuda, or '
                'policy.evaluation = "reference"'
            )
        self._platform = platform
        # where nothing runs an abstract mesh will do for a mesh
        self._mesh = cast(
            Mesh, AbstractMesh((layout.data, layout.context, layout.model), (DATA, CONTEXT, MODEL))
        )
        self.params = shapes(self.model, self.policy, layout, self._mesh)

    def programs(self, case: str, sizes: Sizes) -> list[Program]:
        """The programs of a case: one, but train_step has two, gradient and update."""
        platforms = (self._platform,)
        return [Program(t.lower(lowering_platforms=platforms)) for t in self.traced(case, sizes)]

    def traced(self, case: str, sizes: Sizes) -> list[Any]:
        """The traced calls of a case.

        Raises:
          ContractError: for a case that is not one of CASES.
        """
        if case in (PREFILL, MIXED, DECODE):
            return [self.sampler(sizes.decode if case == DECODE else sizes.mixed, sizes)]
        if case == SCORE:
            return [self.score(sizes.train)]
        if case in (FORWARD, RECOMPUTE):
            return [self.gradient(sizes.train, remat=case == RECOMPUTE)]
        if case == STEP:
            return [self.gradient(sizes.train, self.config.trainer.remat), self.update()]
        raise ContractError(f"unknown case {case!r}; known: {', '.join(CASES)}")

    def sampler(self, bucket: Bucket, sizes: Sizes) -> Any:
        """One call of the rollout engine."""
        executor = Executor(
            self.params, model=self.model, policy=self.policy, layout=self.layout,
            mesh=self._mesh, pages=sizes.pages, slots=sizes.slots,
        )  # fmt: skip
        length = pack([shape_of(bucket)]).shape[1]
        packed = abstract_rows((self.layout.data, length), jnp.int32, self._mesh)
        return executor.jitted(bucket).trace(self.params, executor.abstract_cache(), packed)

    def score(self, bucket: Bucket) -> Any:
        """One scoring call of the trainer."""
        scorer = settings.scorer(self.config, self.model, self._mesh)
        return trace_score(scorer, self.params, abstract_batch(bucket, self._mesh))

    def gradient(self, bucket: Bucket, remat: bool) -> Any:
        """One microbatch: forward, backward, gradients joined to those before."""
        loss = settings.policy_loss(self.config)
        batch = abstract_batch(bucket, self._mesh)
        return trace_gradient(self._trainer(remat), self.params, batch, loss)

    def update(self) -> Any:
        """The optimizer's update."""
        return trace_update(self._trainer(self.config.trainer.remat), self.params)

    def _trainer(self, remat: bool) -> Trainer:
        sizes = dataclasses.replace(self.config.trainer, remat=remat)
        config = dataclasses.replace(self.config, trainer=sizes)
        return settings.trainer(config, self.model, self._mesh)


def trace_score(scorer: Scorer, params: Any, batch: TrainBatch) -> Any:
    """The traced call of a scorer."""
    return scorer.call.trace(params, batch)


def trace_gradient(trainer: Trainer, params: Any, batch: TrainBatch, loss: PolicyLoss) -> Any:
    """The traced call of a trainer for one microbatch."""
    return trainer.add.trace(params, _totals(trainer), batch, loss)


def trace_update(trainer: Trainer, params: Any) -> Any:
    """The traced call of a trainer for the optimizer's update."""
    state = TrainState(params, *trainer.abstract_state())
    return trainer.update.trace(_totals(trainer)[0], state, jax.ShapeDtypeStruct((), jnp.float32))


def _totals(trainer: Trainer) -> Any:
    specs = (trainer.specs.master, PartitionSpec())
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        jax.eval_shape(trainer.zeros),
        trainer.shardings(specs),
    )


def abstract_rows(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A global array whose first axis the data ranks share."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(DATA)))


def abstract_batch(bucket: Bucket, mesh: Mesh) -> TrainBatch:
    """The arrays of a training call; bucket: the shapes of one data rank."""
    data = mesh.shape[DATA]

    def rows(dtype: Any, *shape: int) -> Any:
        return abstract_rows((data * shape[0], *shape[1:]), dtype, mesh)

    ints = partial(rows, jnp.int32)
    t, s, p = bucket.tokens, bucket.sequences, bucket.pieces
    ragged = RaggedBatch(
        **dict.fromkeys(("tokens", "positions", "seq"), ints(t)),
        **dict.fromkeys(("start", "length", "context", "slot"), ints(s)),
        page_table=ints(s, bucket.pages),
        **dict.fromkeys(("piece_seq", "piece_row", "piece_first", "piece_len"), ints(p)),
        piece_rows=bucket.piece_rows,
        whole=True,
    )
    return TrainBatch(ragged, ints(t), *(rows(jnp.float32, t) for _ in range(5)))
