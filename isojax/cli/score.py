"""Log-probabilities of given sequences, by the trainer's forward.

Input lines are {"tokens": [...]} or {"prompt": "...", "response": "..."}. Output lines, in the same
order, are {"logprobs": [...]}: of every token given those before it, so one fewer than tokens; for
text also "tokens" and "prompt_length". Each number reads back to the float32 that was computed.
A bad line gives {"error": ..., "line": ...} and exit status 1.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from isojax.cli import jsonl, session
from isojax.cli.jsonl import BadLine, Line
from isojax.cli.session import Session
from isojax.sampler.request import inverse_temperature
from isojax.trainer.packing import Example
from isojax.trainer.score import Scored, Scorer

# rows of a batch leaf, at least: short sequences share calls of this size
LEAF_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `isojax score`."""
    session.add_arguments(parser)
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=1.0,
        help="logits are divided by it; what was generated at T scores alike at T (default: 1)",
    )


def _temperature(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be finite and not negative, got {text}")
    return value


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A line to score. tokens: int32, at least 2. extra: what else to write of it."""

    line: Line
    tokens: np.ndarray
    extra: dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Score every line of the input; 1 if one was bad."""
    lines = jsonl.read(args.input)
    model = Session.start(args)
    with jsonl.Writer(args.output, lines) as writer:
        sequences = []
        for line in lines:
            try:
                tokens, extra = _tokens(line, model)
            except BadLine as error:
                writer.put(line, error)
                continue
            if len(tokens) == 1:  # nothing stands before it
                writer.put(line, {"logprobs": [], **extra})
            else:
                sequences.append(Sequence(line, np.asarray(tokens, np.int32), extra))
        factor = float(inverse_temperature(args.temperature))
        leaf = _leaf_tokens(sequences, model.policy.chunk)
        scorer = Scorer(model.config, model.policy, model.layout, model.mesh, leaf)
        with tqdm(total=len(sequences), desc="score", unit="line", disable=None) as progress:
            for batch in _batches(sequences, leaf * model.policy.batch_leaves):
                scored = scorer(model.params, [Example(s.tokens, 1, factor) for s in batch])
                for sequence, result in zip(batch, scored, strict=True):
                    writer.put(sequence.line, _result(sequence, result))
                progress.update(len(batch))
        return 1 if writer.failed else 0


def _result(sequence: Sequence, scored: Scored) -> dict[str, Any] | BadLine:
    try:
        return {"logprobs": jsonl.floats(scored.full), **sequence.extra}
    except BadLine as error:
        return error


def _tokens(line: Line, model: Session) -> tuple[list[int], dict[str, Any]]:
    """A line's tokens, and what else to write of it.

    Raises:
      BadLine: if it is not to be scored.
    """
    if isinstance(line.value, BadLine):
        raise line.value
    given = set(line.value)
    vocab, most = model.config.vocab_size, model.config.max_position_embeddings
    extra: dict[str, Any] = {}
    if "tokens" in given and not given & {"prompt", "response"}:
        tokens = jsonl.token_ids(line.value["tokens"], "tokens", vocab)
    elif {"prompt", "response"} <= given and "tokens" not in given:
        prompt, response = (
            model.encode(jsonl.text(line.value[name], name)) for name in ("prompt", "response")
        )
        tokens = jsonl.token_ids(prompt + response, "the text", vocab)
        extra = {"tokens": tokens, "prompt_length": len(prompt)}
    else:
        raise BadLine('a line has either "tokens" or "prompt" and "response"')
    if len(tokens) > most:
        raise BadLine(f"{len(tokens)} tokens, the model takes {most}")
    return tokens, extra


def _leaf_tokens(sequences: list[Sequence], chunk: int) -> int:
    """Rows of a batch leaf: a power of two of chunks that holds the longest sequence."""
    chunks = -(-max([LEAF_TOKENS, *(len(s.tokens) for s in sequences)]) // chunk)
    return chunk << (chunks - 1).bit_length()


def _batches(sequences: list[Sequence], budget: int) -> Iterator[list[Sequence]]:
    """Runs of at most `budget` tokens, or one sequence: what is scored, and written, at a time."""
    batch: list[Sequence] = []
    size = 0
    for sequence in sequences:
        if batch and size + len(sequence.tokens) > budget:
            yield batch
            batch, size = [], 0
        batch.append(sequence)
        size += len(sequence.tokens)
    if batch:
        yield batch
