"""Log-probabilities of given sequences, by the trainer's forward.

Input lines are {"tokens": [...]}, {"prompt": "...", "response": "..."}, or what `isojax generate`
writes: {"prompt_ids": [...], "token_ids": [...], "temperature": ...}, whose other fields do not
count. Output lines, in the same order, are {"logprobs": [...]}: of every token given those before
it, so one fewer than tokens; for a prompt and its response also "tokens" and "prompt_length", and
logprobs[prompt_length - 1:] are the response's. Each number reads back to the float32 that was
computed.
A bad line gives {"error": ..., "line": ...} and exit status 1.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from isojax.arguments import as_temperature
from isojax.cli import jsonl, session
from isojax.cli.jsonl import BadLine, Line
from isojax.cli.session import Session
from isojax.sampler.request import bad_temperature, inverse_temperature
from isojax.trainer.packing import Example
from isojax.trainer.score import Scored, Scorer

# rows of a batch leaf, at least: short sequences share calls of this size
LEAF_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `isojax score`."""
    session.add_arguments(parser)
    parser.add_argument(
        "--temperature",
        type=as_temperature,
        help="logits are divided by it; what was generated at T scores alike at T, and 0 is as 1 "
        "(default: a line's own, which generate writes, else 1)",
    )


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A line to score.

    tokens: int32, at least 2. factor: scales logits. extra: what else to write of it.
    """

    line: Line
    tokens: np.ndarray
    factor: float
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
                factor = _factor(line, args.temperature)
            except BadLine as error:
                writer.put(line, error)
                continue
            if len(tokens) == 1:  # nothing stands before it
                writer.put(line, {"logprobs": [], **extra})
            else:
                sequences.append(Sequence(line, np.asarray(tokens, np.int32), factor, extra))
        leaf = _leaf_tokens(sequences, model.policy.chunk)
        scorer = Scorer(model.config, model.policy, model.layout, model.mesh, leaf)
        with tqdm(total=len(sequences), desc="score", unit="line", disable=None) as progress:
            for batch in _batches(sequences, leaf * model.policy.batch_leaves):
                scored = scorer(model.params, [Example(s.tokens, 1, s.factor) for s in batch])
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
    if "error" in line.value:
        raise BadLine(f"it is an error itself: {line.value['error']}")
    given = set(line.value) & {"tokens", "prompt", "response", "prompt_ids", "token_ids"}
    vocab, most = model.config.vocab_size, model.config.max_position_embeddings
    extra: dict[str, Any] = {}
    if given == {"tokens"}:
        tokens = jsonl.token_ids(line.value["tokens"], "tokens", vocab)
    elif given == {"prompt", "response"}:
        prompt, response = (
            model.encode(jsonl.text(line.value[name], name)) for name in ("prompt", "response")
        )
        tokens = jsonl.token_ids(prompt + response, "the text", vocab)
        extra = {"tokens": tokens, "prompt_length": len(prompt)}
    elif given == {"prompt_ids", "token_ids"}:
        prompt, response = (
            jsonl.token_ids(line.value[name], name, vocab) for name in ("prompt_ids", "token_ids")
        )
        tokens = prompt + response
        extra = {"tokens": tokens, "prompt_length": len(prompt)}
    else:
        raise BadLine(
            'a line has either "tokens", or "prompt" and "response", or "prompt_ids" and '
            '"token_ids"'
        )
    if len(tokens) > most:
        raise BadLine(f"{len(tokens)} tokens, the model takes {most}")
    return tokens, extra


def _factor(line: Line, temperature: float | None) -> float:
    """What scales a line's logits: the command's temperature, or else the line's own, or else 1."""
    assert not isinstance(line.value, BadLine)
    if temperature is None:
        temperature = line.value.get("temperature", 1.0)
    if wrong := bad_temperature(temperature):
        raise BadLine(wrong)
    return float(inverse_temperature(temperature))


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
