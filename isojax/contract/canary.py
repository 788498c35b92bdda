"""Self-check at start: the same tokens by rollout engine and trainer, compared bit by bit.

The run's own engine generates, in prefill, decode and mixed calls, and the run's own scorer
recomputes every log-probability. Both use the programs that the run needs anyway, on its device,
mesh and weights.
"""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from isojax.contract import environment
from isojax.contract.cases import DECODE, MIXED, PREFILL
from isojax.sampler.config import EngineConfig
from isojax.sampler.engine import Engine, Runs
from isojax.sampler.executor import Sampled
from isojax.sampler.inputs import StepInputs
from isojax.sampler.random import sample_key
from isojax.sampler.request import Completion, Request
from isojax.sampler.scheduler import Copies
from isojax.trainer.packing import Example
from isojax.trainer.score import Scorer


@dataclasses.dataclass(frozen=True)
class Parting:
    """A token whose bits differ: its sequence (prompt, response), and the case that sampled it."""

    tokens: np.ndarray
    prompt_length: int
    position: int
    case: str
    rollout: np.float32
    trainer: np.float32

    def __str__(self) -> str:
        bits = [int(x.view(np.uint32)) for x in (self.rollout, self.trainer)]
        return (
            f"position {self.position} of a sequence of {len(self.tokens)}: {self.case} says "
            f"{self.rollout!r} (0x{bits[0]:08x}), the trainer {self.trainer!r} (0x{bits[1]:08x})"
        )


@dataclasses.dataclass(frozen=True)
class Canary:
    """What a self-check found: tokens compared by case, and the first that parts."""

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

    def step(self, bucket: Any, ranks: Sequence[StepInputs]) -> Sampled:
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
        return self._executor.step(bucket, ranks)

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
    params: Any,
    *,
    vocab: int,
    chunk: int,
    ranks: int,
    seed: int = 0,
) -> Canary:
    """Generate with the executor, score with the scorer, compare.

    executor: the run's engine's; `params` must be the weights that it holds.
    """
    recorder = _Recorder(executor)
    engine = Engine(recorder, config, vocab_size=vocab, chunk=chunk, ranks=ranks)
    asked = requests(config, chunk, vocab, ranks, seed)
    done = [samples[0] for samples in engine.generate(asked)]
    recorder.release()  # the scorer may need the memory
    examples = [
        Example(
            np.concatenate([np.asarray(r.prompt_ids, np.int32), c.token_ids]), len(r.prompt_ids)
        )
        for r, c in zip(asked, done, strict=True)
    ]
    scored = [found.full for found in scorer(params, examples)]
    return _compare(recorder, asked, done, scored)


def _compare(
    recorder: _Recorder,
    asked: Sequence[Request],
    done: Sequence[Completion],
    scored: Sequence[np.ndarray],
) -> Canary:
    compared, differing = dict.fromkeys((DECODE, PREFILL, MIXED), 0), {}
    differing = dict(compared)
    first: Parting | None = None
    for request, completion, trainer in zip(asked, done, scored, strict=True):
        if completion.error:
            raise RuntimeError(f"the canary could not generate: {completion.error}")
        prompt = len(request.prompt_ids)
        high, low = (int(x) for x in sample_key(request.seed, 0))
        for t, (ours, theirs) in enumerate(zip(completion.logprobs, trainer, strict=True)):
            case = recorder.kinds[high, low, prompt + t]
            compared[case] += 1
            if ours.view(np.int32) != theirs.view(np.int32):
                differing[case] += 1
                tokens = np.concatenate([np.asarray(request.prompt_ids), completion.token_ids])
                here = Parting(tokens, prompt, prompt + t, case, ours, np.float32(theirs))
                first = first or here
    return Canary(compared, differing, first)


def describe(canary: Canary) -> str:
    """One line."""
    parts = ", ".join(f"{n} {case}" for case, n in canary.compared.items())
    if canary.exact:
        return f"canary: {parts} tokens, all bits equal to the trainer's"
    wrong = ", ".join(f"{n} {case}" for case, n in canary.differing.items() if n)
    return f"canary: of {parts} tokens, {wrong} differ; first {canary.first}"


def tokens_of(request: Request) -> np.ndarray:
    """A request's prompt as an array."""
    return np.asarray(request.prompt_ids, np.int32)
