"""Self-check at start: the same tokens by rollout engine and trainer, compared bit by bit.

The run's own engine generates, in prefill, decode and mixed calls; the run's own scorer recomputes
every log-probability, and so does the forward inside the run's own gradient. All use the programs
that the run needs anyway, on its device, mesh and weights.
"""

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isojax.contract import environment
from isojax.contract.cases import DECODE, FORWARD, MIXED, PREFILL, RECOMPUTE, SCORE
from isojax.sampler.config import EngineConfig
from isojax.sampler.engine import Draws, Engine, Runs
from isojax.sampler.inputs import StepInputs
from isojax.sampler.random import sample_key
from isojax.sampler.request import Completion, Request
from isojax.sampler.scheduler import Copies
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.packing import Example
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer


@dataclasses.dataclass(frozen=True)
class Parting:
    """A token whose bits differ: its sequence (prompt, response), the case that parts from
    train_score, and the log-probabilities of both."""

    tokens: np.ndarray
    prompt_length: int
    position: int
    case: str
    said: np.float32
    scored: np.float32

    def __str__(self) -> str:
        bits = [int(x.view(np.uint32)) for x in (self.said, self.scored)]
        return (
            f"position {self.position} of a sequence of {len(self.tokens)}: {self.case} says "
            f"{self.said!r} (0x{bits[0]:08x}), {SCORE} {self.scored!r} (0x{bits[1]:08x})"
        )


@dataclasses.dataclass(frozen=True)
class Canary:
    """What a self-check found against train_score: tokens compared by case, the first to part."""

    compared: dict[str, int]
    differing: dict[str, int]
    first: Parting | None

    @property
    def exact(self) -> bool:
        return self.first is None

    def evidence(self, mesh: Any, weights_version: int) -> dict[str, Any]:
        """The check as a piece of evidence of a contract."""
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        return {
            "check": "canary",
            "when": now.isoformat(),
            "mesh": str(mesh),
            "where": environment.observed(),
            "weights_version": weights_version,
            "compared": self.compared,
            "differing": self.differing,
        }


class _Recorder:
    """An executor that notes which kind of call sampled each token."""

    def __init__(self, executor: Runs) -> None:
        self._executor = executor
        self.params, self.compiles = executor.params, executor.compiles
        self.kinds: dict[tuple[int, int, int], str] = {}

    def step(self, bucket: Any, ranks: Sequence[StepInputs], after: Any = None) -> Draws:
        length, context = (
            np.concatenate([np.asarray(getattr(rank.batch, name)) for rank in ranks])
            for name in ("length", "context")
        )
        single = (length == 1) & (context > 0)
        if bucket.piece_rows == 1:
            kind = DECODE
        else:
            kind = MIXED if single.any() and (length[~single] > 0).any() else PREFILL
        for rank in ranks:
            settings = rank.settings
            for s in np.flatnonzero(np.asarray(rank.batch.length)):
                high, low = (int(x) for x in settings.key[s])
                self.kinds[high, low, int(settings.position[s])] = kind
        return self._executor.step(bucket, ranks, after)

    def copy(self, ranks: Sequence[Copies]) -> None:
        self._executor.copy(ranks)

    def release(self) -> None:
        self._executor.release()


def requests(config: EngineConfig, chunk: int, vocab: int, ranks: int, seed: int) -> list[Request]:
    """Prompts that bring about every kind of call.

    Their lengths cross a chunk's edge where the engine's length allows it. Together they exceed
    what one call holds, so the later ones are prefilled while the first ones decode.
    """
    random = np.random.default_rng(seed)
    longest = config.max_model_len
    response = max(2, min(chunk // 2 + 4, longest // 4))
    lengths = [min(n, longest - response) for n in (chunk - response // 2, 2 * chunk + 1, 1, chunk)]
    room = ranks * config.prefill_budget(chunk)
    last = longest - response
    while sum(lengths) <= room + chunk and len(lengths) < ranks * config.max_sequences:
        lengths.append(last)
    return [
        Request(
            random.integers(0, vocab, max(1, length)).tolist(),
            response if index < 4 else 2,
            seed=seed + index,
            ignore_eos=True,
        )
        for index, length in enumerate(lengths)
    ]


def check(
    executor: Runs,
    config: EngineConfig,
    scorer: Scorer,
    trainer: Trainer,
    loss: PolicyLoss,
    params: Any,
    *,
    vocab: int,
    chunk: int,
    ranks: int,
    seed: int = 0,
    generated: Callable[[], object] = lambda: None,
) -> Canary:
    """Generate with the executor, score with the scorer and inside the gradient, compare.

    executor: the run's engine's; `params` must be the weights that it holds. generated: called when
    the engine has done its part.
    """
    recorder = _Recorder(executor)
    engine = Engine(recorder, config, vocab_size=vocab, chunk=chunk, ranks=ranks)
    asked = requests(config, chunk, vocab, ranks, seed)
    done = [samples[0] for samples in engine.generate(asked)]
    recorder.release()  # the scorer may need the memory
    generated()
    examples = [
        Example(
            np.concatenate([np.asarray(r.prompt_ids, np.int32), c.token_ids]), len(r.prompt_ids)
        )
        for r, c in zip(asked, done, strict=True)
    ]
    few = max(1, scorer.sure_to_fit)  # a program of its own for many short ones is not worth it
    parts = [examples[i : i + few] for i in range(0, len(examples), few)]
    scored = [found.full for part in parts for found in scorer(params, part)]
    learnt = [found.full for part in parts for found in trainer.logprobs(params, part, loss)]
    within = RECOMPUTE if trainer.remat else FORWARD
    return _compare(recorder, asked, done, {within: learnt}, scored)


def _compare(
    recorder: _Recorder,
    asked: Sequence[Request],
    done: Sequence[Completion],
    learnt: Mapping[str, Sequence[np.ndarray]],
    scored: Sequence[np.ndarray],
) -> Canary:
    """learnt: the trainer's other log-probabilities, by case."""
    compared = dict.fromkeys((DECODE, PREFILL, MIXED, *learnt), 0)
    differing = dict(compared)
    first: Parting | None = None
    for i, (request, completion, theirs) in enumerate(zip(asked, done, scored, strict=True)):
        if completion.error:
            raise RuntimeError(f"the canary could not generate: {completion.error}")
        prompt = len(request.prompt_ids)
        high, low = (int(x) for x in sample_key(request.seed, 0))
        sampled = [recorder.kinds[high, low, prompt + t] for t in range(len(theirs))]
        sides = [(sampled, completion.logprobs)]
        sides += [([case] * len(theirs), rows[i]) for case, rows in learnt.items()]
        for cases, ours in sides:
            same = ours.view(np.int32) == theirs.view(np.int32)
            for t, case in enumerate(cases):
                compared[case] += 1
                differing[case] += not same[t]
                if not same[t] and first is None:
                    tokens = np.concatenate([np.asarray(request.prompt_ids), completion.token_ids])
                    first = Parting(tokens, prompt, prompt + t, case, ours[t], theirs[t])
    return Canary(compared, differing, first)


def describe(canary: Canary) -> str:
    """One line."""
    parts = ", ".join(f"{n} {case}" for case, n in canary.compared.items())
    if canary.exact:
        return f"canary: {parts} tokens, all bits equal to those of {SCORE}"
    wrong = ", ".join(f"{n} {case}" for case, n in canary.differing.items() if n)
    return f"canary: of {parts} tokens, {wrong} differ; first {canary.first}"


def tokens_of(request: Request) -> np.ndarray:
    """A request's prompt as an array."""
    return np.asarray(request.prompt_ids, np.int32)
