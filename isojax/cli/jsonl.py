"""JSON lines in, JSON lines out: a bad line becomes an error line, the others go on."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np


class BadLine(ValueError):
    """What is wrong with one line of input."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of input: its number, counted from 1, and its object, or what is wrong with it."""

    number: int
    value: dict[str, Any] | BadLine


def read(path: Path) -> list[Line]:
    """The lines of a file; those that are blank do not count as input."""
    lines = path.read_bytes().split(b"\n")
    return [Line(number, _parse(text)) for number, text in enumerate(lines, 1) if text.strip()]


def _parse(text: bytes) -> dict[str, Any] | BadLine:
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return BadLine("not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadLine(f"not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(f"not an object: {json.dumps(value)[:40]}")
    return value


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """A field that holds token ids, checked.

    Raises:
      BadLine: if it is no list of integers, is empty, or has an id outside the vocabulary.
    """
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise BadLine(f"{name} is not a list of integers")
    if not value:
        raise BadLine(f"{name} is empty")
    outside = next((token for token in value if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise BadLine(f"token {outside} is outside the vocabulary of {vocab_size}")
    return value


def text(value: Any, name: str) -> str:
    """A field that holds text, checked.

    Raises:
      BadLine: if it is no string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise BadLine(f"{name} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLine(f"{name} is not valid Unicode text") from None
    return value


def floats(values: np.ndarray) -> list[float]:
    """float32 values as JSON numbers that read back to the same float32 (and the same double).

    Raises:
      BadLine: if one is not finite, which JSON cannot say.
    """
    if not np.isfinite(values).all():
        raise BadLine("log-probabilities are not finite")
    return np.asarray(values, np.float32).tolist()


class Writer:
    """Writes results in the order of the input, each as soon as all before it are known.

    failed: how many lines were errors.
    """

    def __init__(self, path: Path, lines: Iterable[Line]) -> None:
        self._numbers = [line.number for line in lines]
        self._results: dict[int, dict[str, Any]] = {}
        self._next = 0
        self.failed = 0
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def put(self, line: Line, result: dict[str, Any] | BadLine) -> None:
        """The result of a line, or what is wrong with it."""
        if isinstance(result, BadLine):
            self.failed += 1
            result = {"error": f"line {line.number}: {result}", "line": line.number}
        self._results[line.number] = result
        while self._next < len(self._numbers) and self._numbers[self._next] in self._results:
            ready = self._results.pop(self._numbers[self._next])
            self._file.write(json.dumps(ready, ensure_ascii=False, allow_nan=False) + "\n")
            self._next += 1
        self._file.flush()
