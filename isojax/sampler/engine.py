"""The rollout engine: requests in, completions out."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from isojax.batch import Bucket
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy
from isojax.sampler import scheduler
from isojax.sampler.config import EngineConfig, buckets
from isojax.sampler.executor import Executor, Sampled
from isojax.sampler.inputs import StepInputs, lay_out
from isojax.sampler.lanes import Lanes
from isojax.sampler.random import sample_key
from isojax.sampler.request import Completion, FinishReason, Request, problem
from isojax.sampler.scheduler import Copies, Plan, Scheduler
from isojax.sampler.text import Detokenize, StopWatch


class Draws(Protocol):
    """A call under way; see `executor.Drawn`."""

    def wait(self) -> Sampled: ...


class Runs(Protocol):
    """What the engine needs of an executor; see `executor.Executor`."""

    params: Any
    compiles: int

    def step(self, bucket: Bucket, ranks: Sequence[StepInputs], after: Any = None) -> Draws: ...
    def copy(self, ranks: Sequence[Copies]) -> None: ...
    def release(self) -> None: ...


class Finished(NamedTuple):
    """A completion, and which it is: sample `sample` of request `request`."""

    request: int
    sample: int
    completion: Completion


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call under way: each rank's plan, the sequences [n] that a token is drawn for, and what
    is drawn."""

    bucket: Bucket
    plans: list[Plan]
    samples: list[np.ndarray]
    draws: Draws


@dataclasses.dataclass(frozen=True)
class Counts:
    """What an engine has done so far.

    tokens: generated. steps: calls, those included in which what was drawn came too late.
    preemptions: sequences that had to start again for want of pages. compiles: programs compiled;
    constant once every bucket in use has been met.
    """

    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    compiles: int = 0


class Engine:
    """Continuous batching over a paged cache.

    On several processes each makes the same engine and the same calls, and gets all completions.

    before_step: called before every step; what it raises ends `stream`, with what is under way.
    """

    def __init__(
        self,
        executor: Runs,
        config: EngineConfig,
        *,
        vocab_size: int,
        chunk: int,
        ranks: int = 1,
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
        weights_version: int = 0,
        contract_digest: str = "",
    ) -> None:
        """See `create`. ranks: data ranks. chunk: tokens of a page."""
        self._executor, self._config = executor, config
        self._vocab_size, self._chunk = vocab_size, chunk
        self._eos_ids, self._detokenize = tuple(eos_ids), detokenize
        self._version, self._digest = weights_version, contract_digest
        self._buckets = buckets(config, chunk)
        sizes = config.max_sequences, config.max_model_len, config.table_width(chunk)
        lanes = [Lanes(*sizes) for _ in range(ranks)]
        pages, budget = config.pool(chunk), config.prefill_budget(chunk)
        self._scheduler = Scheduler(lanes, pages, chunk, budget)
        self._watches: dict[tuple[int, int], StopWatch] = {}
        self._active = False
        self._tokens = self._steps = 0
        self.before_step: Callable[[], None] | None = None

    @classmethod
    def create(
        cls,
        params: Any,
        *,
        model: ModelConfig,
        policy: Policy,
        layout: Layout,
        mesh: Mesh,
        config: EngineConfig,
        detokenize: Detokenize | None = None,
        weights_version: int = 0,
        contract_digest: str = "",
    ) -> "Engine":
        """An engine on a mesh.

        params: global arrays on `mesh`, held by reference. detokenize: token ids -> text, for stop
        strings. weights_version, contract_digest: noted in every completion.
        """
        executor = Executor(
            params,
            model=model,
            policy=policy,
            layout=layout,
            mesh=mesh,
            pages=config.pool(policy.chunk),
            slots=config.max_sequences,
        )
        return cls(
            executor,
            config,
            vocab_size=model.vocab_size,
            chunk=policy.chunk,
            ranks=layout.data,
            eos_ids=model.eos_token_ids,
            detokenize=detokenize,
            weights_version=weights_version,
            contract_digest=contract_digest,
        )

    @property
    def executor(self) -> Runs:
        """The device side of this engine."""
        return self._executor

    @property
    def counts(self) -> Counts:
        return Counts(
            self._tokens, self._steps, self._scheduler.preemptions, self._executor.compiles
        )

    def update_params(self, params: Any, version: int) -> None:
        """Sample with other weights (same shapes, dtypes and shardings) from now on.

        Nothing cached outlives `stream`, so no key, value or state of the old weights is ever read.

        Raises:
          RuntimeError: while `stream` is running.
        """
        if self._active:
            raise RuntimeError("weights cannot change while requests are being served")
        self._executor.params, self._version = params, version

    def release_cache(self) -> None:
        """Free the memory of the cache until the next request.

        Raises:
          RuntimeError: while `stream` is running.
        """
        if self._active:
            raise RuntimeError("the cache is in use while requests are being served")
        self._executor.release()

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each request, in order, its n completions, in order."""
        done = {(r, s): completion for r, s, completion in self.stream(requests)}
        return [
            [done[r, s] for s in range(samples_of(request))] for r, request in enumerate(requests)
        ]

    def stream(self, requests: Sequence[Request]) -> Iterator[Finished]:
        """Completions as they finish. To stop early, close the iterator.

        Raises:
          RuntimeError: if another `stream` of this engine is running.
        """
        if self._active:
            raise RuntimeError("this engine is serving requests already")
        self._active = True
        try:
            for number, request in enumerate(requests):
                error = self._refusal(request)
                if error is None:
                    self._submit(number, request)
                else:
                    for sample in range(samples_of(request)):
                        yield Finished(number, sample, self._failed(error))
            yield from self._serve()
        finally:
            self._scheduler.clear()
            self._watches.clear()
            self._active = False

    def _refusal(self, request: Request) -> str | None:
        error = problem(request, self._vocab_size, self._config.max_model_len)
        if error is None and request.stop and self._detokenize is None:
            error = "stop strings need an engine with a detokenizer"
        if error is None:
            # the last token is never cached
            pages = -(-(self._limit(request) - 1) // self._chunk)
            if pages > self._config.pool(self._chunk):
                error = (
                    f"prompt and response may need {pages} pages of {self._chunk} tokens, "
                    f"the pool has {self._config.pool(self._chunk)}"
                )
        return error

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self._config.max_model_len)

    def _submit(self, number: int, request: Request) -> None:
        prompt = [int(token) for token in request.prompt_ids]
        limit = self._limit(request)
        ids = {int(token) for token in request.stop_ids}
        stop_ids = tuple(ids if request.ignore_eos else ids.union(self._eos_ids))
        samples = []
        for i in range(request.n):
            key = sample_key(int(request.seed), i)
            samples.append(
                scheduler.Sequence((number, i), request, list(prompt), limit, key, stop_ids)
            )
            if request.stop and self._detokenize is not None:
                self._watches[number, i] = StopWatch(request.stop, self._detokenize)
        self._scheduler.add(samples)

    def _serve(self) -> Iterator[Finished]:
        """Call until nothing is left to do.

        While a call runs, the next one is started, if it can be one like it: then the device need
        not wait for this host. What a sequence draws there that has ended before is passed over;
        its pages and its slot are given to others only in later calls.
        """
        call: _Call | None = None
        while self._scheduler.busy:
            call = call or self._start()
            following = self._follow(call)
            yield from self._finish(call)
            call = following

    def _start(self) -> _Call:
        """Plan and start a call, with nothing under way."""
        plans = self._scheduler.plan()
        bucket = self._bucket(plans)
        if any(plan.copies.slots for plan in plans):
            self._executor.copy([plan.copies for plan in plans])
        return self._launch(bucket, plans)

    def _follow(self, call: _Call) -> _Call | None:
        """Start the call after one that is under way, if it can be planned already."""
        plans = self._scheduler.follow()
        return None if plans is None else self._launch(call.bucket, plans, call.draws)

    def _launch(self, bucket: Bucket, plans: list[Plan], after: Draws | None = None) -> _Call:
        if self.before_step is not None:
            self.before_step()
        pairs = [(r.lanes, plan) for r, plan in zip(self._scheduler.ranks, plans, strict=True)]
        inputs = [lay_out(lanes, plan, bucket, self._chunk) for lanes, plan in pairs]
        draws = self._executor.step(bucket, inputs, after)
        self._steps += 1
        samples = []
        for lanes, plan in pairs:
            slot = plan.slots
            lanes.cached[slot] += np.asarray(plan.counts, np.int32)
            known = lanes.known[slot] + (after is not None)  # one is still being drawn
            samples.append(lanes.samples[slot] & (lanes.cached[slot] == known))
        return _Call(bucket, plans, samples, draws)

    def _finish(self, call: _Call) -> Iterator[Finished]:
        """Wait for a call; yields what it ended."""
        sampled = call.draws.wait()
        for i, (rank, plan) in enumerate(zip(self._scheduler.ranks, call.plans, strict=True)):
            n = len(plan.seqs)
            drawn = (sampled.tokens[i, :n], sampled.logprobs[i, :n], sampled.thresholds[i, :n])
            for seq, reason, details in self._advance(rank.lanes, plan, call.samples[i], *drawn):
                rank.release(seq)
                yield Finished(*seq.order, self._completion(seq, reason, **details))

    def _bucket(self, plans: Sequence[Plan]) -> Bucket:
        """The cheapest shape that holds every rank's plan."""
        tokens = max(sum(plan.counts) for plan in plans)
        single = all(count == 1 for plan in plans for count in plan.counts)
        return next(b for b in self._buckets if b.tokens >= tokens and (single or b.piece_rows > 1))

    def _advance(
        self,
        lanes: Lanes,
        plan: Plan,
        samples: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        thresholds: np.ndarray,
    ) -> list[tuple[scheduler.Sequence, FinishReason, dict[str, Any]]]:
        """Enter what one rank's sequences drew; those that have ended, and how."""
        slot = plan.slots
        sampled = samples & (slot >= 0)  # what has ended since holds no slot
        fine = sampled & np.isfinite(logprobs)
        lanes.append(slot[fine], tokens[fine], logprobs[fine], thresholds[fine])
        self._tokens += int(fine.sum())

        stop = fine & (tokens[:, None] == lanes.stop_ids[slot]).any(axis=1)
        full = lanes.known[slot] == lanes.limit[slot]
        ended: list[tuple[scheduler.Sequence, FinishReason, dict[str, Any]]] = []
        for i in np.flatnonzero(sampled & (~fine | stop | full | lanes.watched[slot])).tolist():
            seq, token = plan.seqs[i], int(tokens[i])
            if not fine[i]:
                error = f"logits at position {lanes.known[slot[i]]} are not finite"
                ended.append((seq, "error", {"error": error}))
            elif stop[i]:
                ended.append((seq, "stop", {"stop": token}))
            elif lanes.watched[slot[i]] and (text := self._watches[seq.order].push(token)):
                ended.append((seq, "stop", {"stop": text}))
            elif full[i]:
                ended.append((seq, "length", {}))
        return ended

    def _completion(
        self,
        seq: scheduler.Sequence,
        reason: FinishReason,
        stop: int | str | None = None,
        error: str | None = None,
    ) -> Completion:
        response = seq.tokens[len(seq.request.prompt_ids) :]
        return Completion(
            np.asarray(response, np.int32),
            seq.logprobs,
            seq.thresholds,
            reason,
            stop,
            error,
            self._version,
            self._digest,
        )

    def _failed(self, error: str) -> Completion:
        empty = np.zeros(0, np.float32)
        return Completion(
            np.zeros(0, np.int32),
            empty,
            empty,
            "error",
            error=error,
            weights_version=self._version,
            contract_digest=self._digest,
        )


def samples_of(request: Request) -> int:
    """Completions that a request gets; one, an error, if its n makes no sense."""
    n = request.n
    return n if isinstance(n, int) and n > 0 else 1
