"""What a caller asks of the sampler, and what comes back."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Checked by `problem`, not on construction: a bad request
    becomes an error of its own and leaves the others alone.

    prompt_ids: token ids, at least one.
    max_tokens: most tokens to generate; the engine's max_model_len limits prompt and response
      together and may end a response earlier.
    temperature: logits are divided by it; 0 is greedy (its log-probabilities are at temperature 1).
    top_k: keep the k likeliest tokens (all of equal probability with the k-th); 0 keeps all.
    top_p: of those keep the smallest set of likeliest tokens whose probability, relative to what
      top_k kept, reaches top_p; 1 keeps all.
    min_p: keep tokens of at least this probability relative to the likeliest; 0 keeps all.
    seed: in [0, 2**64). A sample is a function of (seed, its index, prompt, weights).
    n: samples to draw; sample i is the same whatever n is.
    stop_ids: token ids that end a response, besides the model's end-of-sequence ids.
    stop: strings that end a response (the engine then needs a `detokenize`).
    ignore_eos: go on after the model's end-of-sequence ids.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample of a request.

    token_ids: int32 [R], as sampled; what ended the response (a stop id, the last token of a stop
      string) is among them.
    logprobs: float32 [R], at the sampling temperature, over the full vocabulary.
    thresholds: float32 [R], the smallest scaled logit that was kept: the kept set of token t is
      every token whose scaled logit is at least thresholds[t]. -inf where nothing was cut.
    finish_reason: "stop", "length", or "error" (then `error` says why, and the arrays hold what
      had been sampled before).
    stop: the id or string that ended the response, if one did.
    weights_version, contract_digest: what the engine was given; the trainer checks them.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    thresholds: np.ndarray
    finish_reason: FinishReason
    stop: int | str | None = None
    error: str | None = None
    weights_version: int = 0
    contract_digest: str = ""


def inverse_temperature(temperature: float) -> np.float32:
    """The float32 factor that scales logits, rounded once; 1 for greedy."""
    return np.float32(1.0) if temperature == 0 else np.float32(1.0 / temperature)


def bad_temperature(value: Any) -> str | None:
    """Why logits cannot be divided by a temperature, or None; 0 stands for greedy."""
    if wrong := _not_finite("temperature", value):
        return wrong
    if value < 0:
        return f"temperature must not be negative, got {value}"
    if value and 1.0 / float(value) > float(np.finfo(np.float32).max):
        return f"temperature {value} is too small; 0 is greedy"
    return None


def _not_finite(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return f"{name} must be a number, got {value!r}"
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        finite = False
    return None if finite else f"{name} must be finite, got {value}"


def problem(request: Request, vocab_size: int, max_model_len: int) -> str | None:
    """Why a request cannot be served, or None."""
    try:
        prompt = np.asarray(request.prompt_ids)
    except (TypeError, ValueError):
        return "prompt_ids is not a flat list of integers"
    if prompt.size == 0:
        return "the prompt is empty"
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        return "prompt_ids is not a flat list of integers"
    if len(prompt) >= max_model_len:
        return (
            f"a prompt of {len(prompt)} tokens leaves no room for a response "
            f"(max_model_len is {max_model_len})"
        )
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if outside.size:
        return f"token {outside[0]} is outside the vocabulary of {vocab_size}"
    return _bad_setting(request, vocab_size)


def _bad_setting(request: Request, vocab_size: int) -> str | None:
    for name, least in (("max_tokens", 1), ("top_k", 0), ("n", 1), ("seed", 0)):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            return f"{name} must be an integer of at least {least}, got {value!r}"
    if request.seed >= 2**64:
        return f"seed must be below 2**64, got {request.seed}"
    wrong = bad_temperature(request.temperature)
    for name in ("top_p", "min_p"):
        wrong = wrong or _not_finite(name, getattr(request, name))
    if wrong:
        return wrong
    if np.float32(request.top_p) <= 0 or request.top_p > 1:
        return f"top_p must be within (0, 1], got {request.top_p}"
    if not 0 <= request.min_p <= 1:
        return f"min_p must be within [0, 1], got {request.min_p}"
    if any(not isinstance(text, str) or not text for text in request.stop):
        return "stop strings must be strings and not empty"
    for token in request.stop_ids:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            return f"stop id {token!r} is outside the vocabulary of {vocab_size}"
    return None
