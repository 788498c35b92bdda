"""The main job: warm start, then DAPO, with rollouts and trainer in bit-for-bit agreement.

A run owns a folder: config.toml, contract.json, metrics.jsonl, TensorBoard events, plots,
checkpoints. Every step leaves it in a state from which the run can go on as if it had never
stopped.

Several processes run all of this alike, each on its devices of the mesh. The first one writes the
folder, but for checkpoints, of which each writes its shards.
"""

import dataclasses
import gc
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isojax import distributed
from isojax.config import RunConfig, resolve_model
from isojax.config_io import to_toml
from isojax.contract import claims, startup
from isojax.contract.contract import FILE_NAME, from_document
from isojax.contract.enforce import check_resume, check_rollout
from isojax.extras import check_extras
from isojax.models import hf
from isojax.models.init import init_params
from isojax.ops.kernel import check_device
from isojax.report.report import Report, progress
from isojax.rl import dapo
from isojax.rl.data import prompt_stream
from isojax.rl.rewards import rewards_of
from isojax.rl.warm_start import answers
from isojax.sampler.engine import Engine
from isojax.sampler.settings import engine_config, executor
from isojax.tokenizer import TINY, Tokenizer
from isojax.trainer import settings
from isojax.trainer.checkpoint import Checkpoints, newest_position
from isojax.trainer.interrupt import Interrupts
from isojax.trainer.optimizer import Schedule
from isojax.trainer.packing import Example
from isojax.trainer.score import Scored, compare
from isojax.trainer.step import StepResult

log = logging.getLogger(__name__)


class DisagreementError(RuntimeError):
    """Trainer and rollout gave different bits to the log-probability of the same token."""


class NotFiniteError(RuntimeError):
    """A gradient was not finite."""


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run has come: all that is needed besides the weights and the optimizer state.

    warm: supervised steps done. step: DAPO steps done. stream: index of the next row of data.
    """

    warm: int = 0
    step: int = 0
    stream: int = 0

    @property
    def number(self) -> int:
        """The checkpoint's number."""
        return self.warm + self.step


def finished(config: RunConfig) -> bool:
    """Whether the newest checkpoint in the run folder is that of the last step.

    Raises:
      CheckpointError: that checkpoint is damaged.
    """
    saved = newest_position(config.folder / "checkpoints")
    if saved is None:
        return False
    at = Position(**saved["position"])
    return at.warm >= config.warm_start.steps and at.step >= config.steps


class Run:
    """One run, from its configuration to its last checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        accept_contract_change: bool = False,
        pinned: Path | None = None,
        known: Path | None = None,
    ) -> None:
        """Build every part, and load what `resume` finds in the run folder.

        accept_contract_change: resume also under another numerical contract than the checkpoint's.
        pinned, known: contract files, see `isojax.contract.startup.of_run`.

        Raises:
          ContractError: the mesh is not admitted, a pinned contract does not hold, or the
            checkpoint was written under another one.
          MismatchError: processes were started differently, or do not see the same run folder.
          FileExistsError: the folder holds a run already, and `resume` is not set.
          FileNotFoundError: `resume` is set, and there is no checkpoint.
          CheckpointError: the checkpoint is damaged.
          ValueError: the configuration's parts do not fit each other, or the data is of no use.
          ImportError: a package that the configuration needs is missing.
        """
        self.config = config
        check_extras(config)
        distributed.check_same("settings", to_toml(config))
        self.model = resolve_model(config)
        self.tokenizer = Tokenizer(config.data.tokenizer or config.checkpoint or TINY)
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, "
                f"the model only {self.model.vocab_size}"
            )
        self.rewards = rewards_of(config.data)
        self.stream = prompt_stream(config.data, self.tokenizer, config.seed)
        check_device(config.policy)
        claims.check_mesh(self.model, config.policy, config.mesh)
        self.mesh = config.mesh.mesh()
        distributed.check_mesh(self.mesh)
        self.contract = startup.of_run(config, pinned=pinned, known=known)
        self.trainer = settings.trainer(config, self.model, self.mesh)
        self.checkpoints = Checkpoints(
            config.folder / "checkpoints", self.trainer, keep=config.trainer.keep_checkpoints
        )
        distributed.check_same("newest checkpoints", f"step {self.checkpoints.latest()}")
        self._whole = True  # whether `state` is that of `position`, not of the middle of a step
        if resume:
            saved = self.checkpoints.position()
            check_resume(
                from_document(saved["contract"]), self.contract, accept=accept_contract_change
            )
            self.position = Position(**saved["position"])
            self.state = self.checkpoints.restore()
        elif self.checkpoints.latest() is not None:
            raise FileExistsError(
                f"{config.folder} holds a run already: --resume it, or give another --name"
            )
        else:
            self.position = Position()
            self.state = self.trainer.init(self._first_weights())
        self.stream.position = self.position.stream
        self.scorer = settings.scorer(config, self.model, self.mesh)
        self.executor = executor(config, self.model, self.mesh, self.state.params)
        self.engine = Engine(
            self.executor,
            engine_config(config),
            vocab_size=self.model.vocab_size,
            chunk=config.policy.chunk,
            ranks=config.mesh.data,
            eos_ids=self.model.eos_token_ids,
            detokenize=self.tokenizer.decode,
            weights_version=self.position.step,
            contract_digest=self.contract.numerical,
        )
        self.loss = settings.policy_loss(config)

    def _first_weights(self) -> Any:
        config = self.config
        if config.checkpoint:
            return hf.load(config.checkpoint, self.mesh, config.mesh, config.policy)[1]
        return init_params(self.model, config.policy, config.mesh, self.mesh, config.seed)

    def run(self) -> None:
        """Train to the last step. However it ends, the last whole step is in a checkpoint, unless a
        second signal or a gradient that is not finite ends it amid the minibatches of a step, or
        one of several processes is lost: then the newest checkpoint is the last regular one.

        Raises:
          KeyboardInterrupt: SIGINT or SIGTERM came.
          ContractError: the canary found a difference, or rollouts are of another contract.
          DisagreementError: rollout and trainer differ, and the configuration says to stop then.
          NotFiniteError: a gradient was not finite.
          MismatchError: processes have sampled different bits.
        """
        config, folder = self.config, self.config.folder
        if distributed.first():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        try:
            with Interrupts() as interrupts:
                self._self_check()
                self._warm_start(interrupts)
                first = self.position.step + 1
                with Report(folder, config.report, config.steps, first) as report:
                    while self.position.step < config.steps:
                        self._step(interrupts, report)
                        if self.position.step == first:
                            _keep_all()
        finally:
            if distributed.arrive():
                self._save()
                self.checkpoints.close()
            else:
                log.error(
                    "this process ends alone: the last checkpoint is %s", self.checkpoints.latest()
                )

    def _self_check(self) -> None:
        """Compare rollout and trainer on this device before anything depends on it."""
        self.contract = startup.self_check(
            self.contract,
            self.config,
            mesh=self.mesh,
            executor=self.executor,
            scorer=self.scorer,
            trainer=self.trainer,
            params=self.state.params,
            weights_version=self.position.step,
        )
        if distributed.first():
            self.contract.save(self.config.folder / FILE_NAME)

    def _save(self) -> None:
        if not self._whole:
            log.warning(
                "a step was cut short: the last checkpoint is %s", self.checkpoints.latest()
            )
            return
        at = dataclasses.asdict(self.position)
        beside = {"position": at, "contract": self.contract.document()}
        self.checkpoints.save(self.position.number, self.state, beside)

    def _warm_start(self, interrupts: Interrupts) -> None:
        config = self.config.warm_start
        steps = range(self.position.warm, config.steps)
        if not steps:
            return
        start, shown = time.perf_counter(), max(1, config.steps // 5)
        for step in progress(steps, "warm start", len(steps), enabled=self.config.report.progress):
            interrupts.point()
            examples = answers(self.stream, self.stream.take(config.prompts))
            with interrupts.held():
                (result,) = self._train([examples], settings.warm_schedule(self.config))
                if step + 1 == config.steps:
                    self.state = self.trainer.init(self.state.params)
                self.position = Position(step + 1, 0, self.stream.position)
            if (step + 1) % shown == 0 and distributed.first():
                seconds = time.perf_counter() - start
                done = f"warm start {step + 1}/{config.steps}"
                print(f"{done}  loss {result.negative_logp:.3f}  {seconds:.1f} s", flush=True)
        self.engine.update_params(self.state.params, self.position.step)
        self._save()

    def _step(self, interrupts: Interrupts, report: Report) -> None:
        """One DAPO step: sample, score, train."""
        config, clock = self.config, _Clock()
        rollouts = dapo.collect(
            self.stream,
            self._generate(interrupts, report),
            self.rewards,
            self.tokenizer,
            config.algorithm,
            config.sampler,
            config.seed,
        )
        self.engine.release_cache()
        metrics: dict[str, Any] = {"step": self.position.step + 1, **dapo.rollout_metrics(rollouts)}
        metrics["time_generate_s"] = clock.lap()
        examples = dapo.examples_of(rollouts.groups, config.algorithm, config.sampler)
        scored = self.scorer(self.state.params, examples)
        metrics |= self._agreement(rollouts.groups, scored)
        metrics["time_score_s"] = clock.lap()
        examples = [
            dataclasses.replace(example, old_logp=own.kept)
            for example, own in zip(examples, scored, strict=True)
        ]
        size = config.trainer.minibatch_prompts * config.algorithm.samples_per_prompt
        minibatches = [examples[i : i + size] for i in range(0, len(examples), size)]
        interrupts.point()
        with interrupts.held():
            results = self._train(minibatches, settings.schedule(config))
            self.position = dataclasses.replace(
                self.position, step=self.position.step + 1, stream=self.stream.position
            )
            self.engine.update_params(self.state.params, self.position.step)
            metrics |= _train_metrics(results)
            metrics["contract_digest"] = self.contract.numerical
            metrics["reward_failures"] = self.rewards.failures
            metrics["time_train_s"] = clock.lap()
            report.step(metrics)
            every = config.trainer.checkpoint_every
            if every and self.position.step % every == 0:
                self._save()

    def _generate(self, interrupts: Interrupts, report: Report) -> dapo.Generate:
        """The engine's `generate`, with a progress bar over samples."""
        self.engine.before_step = interrupts.point

        def generate(requests: Sequence[dapo.Request]) -> list[list[dapo.Completion]]:
            asked = [np.asarray([request.seed, *request.prompt_ids]) for request in requests]
            distributed.check_same("prompts", *asked)
            total = sum(request.n for request in requests)
            stream = report.progress(self.engine.stream(requests), "generate", total)
            done = {(r, s): completion for r, s, completion in stream}
            return [[done[r, s] for s in range(q.n)] for r, q in enumerate(requests)]

        return generate

    def _agreement(self, groups: Sequence[dapo.Group], scored: Sequence[Scored]) -> dict[str, Any]:
        """Compare the rollout's log-probabilities with the trainer's, and act on a difference."""
        sampled = [completion for group in groups for completion in group.completions]
        check_rollout(self.contract, sampled, self.position.step)
        found = compare(
            [completion.logprobs for completion in sampled],
            [own.full for own in scored],
            self.config.algorithm.mismatch_cap,
        )
        if not found.exact:
            message = (
                f"step {self.position.step + 1}: {found.differing} of {found.tokens} "
                f"log-probabilities differ between rollout and trainer, by {found.diff_max} at most"
            )
            if self.config.contract.on_difference == "stop":
                raise DisagreementError(message)
            log.warning("%s", message)
        return {
            "logp_diff_max": found.diff_max,
            "logp_diff_mean": found.diff_mean,
            "logp_differing_tokens": found.differing,
            "mismatch_clipped_tokens": found.clipped,
        }

    def _train(
        self, minibatches: Sequence[Sequence[Example]], schedule: Schedule
    ) -> list[StepResult]:
        results = []
        for minibatch in minibatches:
            _check_same(minibatch)
        self._whole = False
        for minibatch in minibatches:
            self.state, result = self.trainer.step(self.state, minibatch, self.loss, schedule)
            if not result.finite:
                at = self.position
                warm = at.warm < self.config.warm_start.steps
                where = f"warm start step {at.warm + 1}" if warm else f"step {at.step + 1}"
                raise NotFiniteError(f"{where}: the norm of the gradient is {result.grad_norm}")
            results.append(result)
        self._whole = True
        return results


def _check_same(examples: Sequence[Example]) -> None:
    """Every process trains on the same bits; a chip or host that computes others is found here."""
    if distributed.count() == 1:
        return
    arrays = [
        np.asarray(part)
        for e in examples
        for part in (e.tokens, e.old_logp, e.threshold, e.advantage, e.weight)
        if part is not None
    ]
    distributed.check_same("samples and advantages", *arrays)


def _train_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Of a step's minibatches: sums over tokens, means of losses and norms, the last rate."""
    tokens = sum(result.tokens for result in results)
    clipped = sum(result.clip_fraction * result.tokens for result in results)
    return {
        "loss": float(np.mean([result.loss for result in results])),
        "grad_norm": float(np.mean([result.grad_norm for result in results])),
        "lr": results[-1].learning_rate,
        "clip_fraction": clipped / max(tokens, 1.0),
        "tokens_trained": int(tokens),
    }


def _keep_all() -> None:
    """Let the garbage collector pass over what is alive now.

    Traced and lowered programs are millions of Python objects that stay. A full collection walks
    them all, for half a second or more, whenever it happens to come.
    """
    gc.collect()
    gc.freeze()


class _Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        self._last, elapsed = now, now - self._last
        return elapsed
