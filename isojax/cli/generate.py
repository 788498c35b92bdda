"""Continue prompts, by the rollout engine.

Input lines are {"prompt_ids": [...]} or {"prompt": "..."}. Output lines, in the same order, are
{"prompt_ids": [...], "token_ids": [...], "logprobs": [...], "temperature": ..., "text": ...,
"finish_reason": "stop" or "length"}, which `isojax score` reads as they are. Log-probabilities are
at the sampling temperature (at 1 if it is 0: greedy), over the full vocabulary, and read back to
the float32 that was computed. text is null if the checkpoint has no tokenizer; it ends before the
stop string that ended the response, whose tokens are among token_ids. What is sampled is a function
of the seed, the prompt and the sampling settings, whatever else is in the file; equal prompts get
equal samples.
A bad line gives {"error": ..., "line": ...} and exit status 1.
"""

import argparse
import dataclasses
import hashlib
from typing import Any

import numpy as np
from tqdm import tqdm

from isojax.arguments import as_temperature
from isojax.cli import jsonl, session
from isojax.cli.jsonl import BadLine, Line
from isojax.cli.session import Session
from isojax.sampler.config import EngineConfig
from isojax.sampler.engine import Engine
from isojax.sampler.request import Completion, Request, problem
from isojax.tokenizer import cut_at_stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `isojax generate`."""
    session.add_arguments(parser)
    add = parser.add_argument
    add("--max-tokens", type=int, required=True, metavar="N", help="most tokens of a response")
    add("--temperature", type=as_temperature, default=1.0, help="0 is greedy (default: 1)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this probability")
    add("--top-k", type=int, default=0, help="keep this many tokens; 0 keeps all (default)")
    add("--min-p", type=float, default=0.0, help="keep tokens at least this likely, relatively")
    add("--seed", type=int, default=0)
    add(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end a response, whose text ends before TEXT; repeatable",
    )  # fmt: skip
    add("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    add("--max-sequences", type=int, default=64, help="at the same time, a data rank (default: 64)")
    add("--max-batch-tokens", type=int, default=2048, help="new tokens of a call, a data rank")
    add("--pages", type=int, default=0, help="of the cache, a data rank (default: enough for all)")


def run(args: argparse.Namespace) -> int:
    """Continue every line of the input; 1 if one was bad."""
    lines = jsonl.read(args.input)
    model = Session.start(args)
    template = _template(args, model)
    with jsonl.Writer(args.output, lines) as writer:
        good: list[tuple[Line, Request]] = []
        for line in lines:
            try:
                prompt = _prompt(line, model)
            except BadLine as error:
                writer.put(line, error)
            else:
                seed = _seed(args.seed, prompt)
                good.append((line, dataclasses.replace(template, prompt_ids=prompt, seed=seed)))
        engine = Engine.create(
            model.params,
            model=model.config,
            policy=model.policy,
            layout=model.layout,
            mesh=model.mesh,
            config=_sizes(args, model, [request for _, request in good]),
            detokenize=model.tokenizer.decode if model.tokenizer else None,
        )
        finished = engine.stream([request for _, request in good])
        for number, _, completion in tqdm(
            finished, total=len(good), desc="generate", unit="line", disable=None
        ):
            writer.put(good[number][0], _result(good[number][1], completion, model))
        return 1 if writer.failed else 0


def _template(args: argparse.Namespace, model: Session) -> Request:
    """The request that all lines share but for the prompt.

    Raises:
      ValueError: if a setting makes no sense.
    """
    eos = () if args.ignore_eos or model.tokenizer is None else model.tokenizer.eos_ids
    request = Request(
        prompt_ids=[0],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop_ids=[token for token in eos if token < model.config.vocab_size],
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    wrong = problem(request, model.config.vocab_size, max_model_len=2)
    if wrong:
        raise ValueError(wrong)
    if args.stop and model.tokenizer is None:
        raise ValueError("--stop needs a tokenizer, and the checkpoint has no tokenizer.json")
    return request


def _prompt(line: Line, model: Session) -> list[int]:
    if isinstance(line.value, BadLine):
        raise line.value
    given = set(line.value) & {"prompt_ids", "prompt"}
    if len(given) != 1:
        raise BadLine('a line has either "prompt_ids" or "prompt"')
    vocab = model.config.vocab_size
    if "prompt_ids" in given:
        prompt = jsonl.token_ids(line.value["prompt_ids"], "prompt_ids", vocab)
    else:
        ids = model.encode(jsonl.text(line.value["prompt"], "prompt"))
        prompt = jsonl.token_ids(ids, "the prompt", vocab)
    most = model.config.max_position_embeddings
    if len(prompt) >= most:
        raise BadLine(f"a prompt of {len(prompt)} tokens leaves no room, the model takes {most}")
    return prompt


def _seed(seed: int, prompt: list[int]) -> int:
    """A prompt's own seed: under one seed, prompts of equal length would share their noise."""
    data = np.asarray([seed, *prompt], "<u8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _sizes(args: argparse.Namespace, model: Session, requests: list[Request]) -> EngineConfig:
    """An engine that holds the longest request, within what the model takes."""
    need = max((len(r.prompt_ids) for r in requests), default=1) + args.max_tokens
    ranks = model.layout.data
    return EngineConfig(
        max_model_len=min(need, model.config.max_position_embeddings),
        max_sequences=min(args.max_sequences, max(1, -(-len(requests) // ranks))),
        max_batch_tokens=args.max_batch_tokens,
        pages=args.pages,
    )


def _result(request: Request, completion: Completion, model: Session) -> dict[str, Any] | BadLine:
    if completion.error is not None:
        return BadLine(completion.error)
    ids = completion.token_ids.tolist()
    text = cut_at_stop(model.tokenizer.decode(ids), request.stop) if model.tokenizer else None
    return {
        "prompt_ids": list(request.prompt_ids),
        "token_ids": ids,
        "logprobs": jsonl.floats(completion.logprobs),
        "temperature": request.temperature,
        "text": text,
        "finish_reason": completion.finish_reason,
    }
