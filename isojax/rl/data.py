"""Prompts of a run: an endless stream over reasoning-gym tasks or files, resumed from an index."""

import codecs
import dataclasses
import glob
import json
import logging
import numbers
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isojax.config import DataConfig
from isojax.tokenizer import Message, Tokenizer

log = logging.getLogger(__name__)

_BLOCK = 1024  # rows that one reasoning-gym data set is made for
_GIVE_UP = 10_000  # rows in a row that may be too long before a stream is called empty
_SHOWN = 10  # bad rows that an error names
_BATCH = 4096  # parquet rows that are turned into Python objects at a time


class DataError(ValueError):
    """Data that a run cannot use; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question.

    index: its place in the stream, which makes it unique in a run.
    tokens: ids of the rendered prompt.
    text: the rendered prompt.
    answer: the right answer.
    row: the row it came from, for scorers.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    answer: str
    row: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a source: a question (text or chat messages), its answer, and all its columns."""

    question: str | Sequence[Message]
    answer: str
    columns: Mapping[str, Any]


class Source(Protocol):
    """Rows by index, from 0 without end. The same index always gives the same row."""

    def row(self, index: int) -> Row: ...


class PromptStream:
    """The prompts of a source, in order, without those that are too long.

    position: index of the next row to read; all that is needed to resume.
    skipped: rows left out so far because they were too long.
    """

    def __init__(
        self, source: Source, tokenizer: Tokenizer, config: DataConfig, position: int = 0
    ) -> None:
        if config.chat_template and not tokenizer.has_chat_template:
            raise ValueError("the tokenizer has no chat template: set data.chat_template = false")
        self._source, self._tokenizer, self._config = source, tokenizer, config
        self.position = position
        self.skipped = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts.

        Raises:
          DataError: 10,000 rows in a row were longer than max_prompt_tokens, or the chat template
            refuses a row.
        """
        prompts: list[Prompt] = []
        skipped, run = 0, 0
        while len(prompts) < count:
            prompt = self._prompt(self.position)
            self.position += 1
            if len(prompt.tokens) <= self._config.max_prompt_tokens:
                prompts.append(prompt)
                run = 0
                continue
            skipped, run = skipped + 1, run + 1
            if run == _GIVE_UP:
                raise DataError(
                    f"{run} prompts in a row are longer than data.max_prompt_tokens "
                    f"({self._config.max_prompt_tokens})"
                )
        if skipped:
            self.skipped += skipped
            log.warning(
                "left out %d prompts of more than %d tokens (%d so far)",
                skipped,
                self._config.max_prompt_tokens,
                self.skipped,
            )
        return prompts

    def check(self, source: "FileSource") -> None:
        """Render a row of every order of roles in `source`: what a chat template may refuse.

        Raises:
          DataError: it does.
        """
        for place, question in source.examples:
            try:
                self._render(question)
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None

    def answer_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the right answer and of the end of the response: what a warm start imitates."""
        return (*self._tokenizer.encode(prompt.answer), self._tokenizer.eos_ids[0])

    def _prompt(self, index: int) -> Prompt:
        row = self._source.row(index)
        try:
            text = self._render(row.question)
        except ValueError as error:
            raise DataError(f"row {index + 1} of the stream: {error}") from None
        tokens = tuple(self._tokenizer.encode(text))
        return Prompt(index, tokens, text, row.answer, row.columns)

    def _render(self, question: str | Sequence[Message]) -> str:
        messages = (
            [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        )
        if self._config.system_prompt:
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        if self._config.chat_template:
            return self._tokenizer.render(messages)
        return "\n\n".join(message["content"] for message in messages)


def prompt_stream(
    config: DataConfig, tokenizer: Tokenizer, seed: int, position: int = 0
) -> PromptStream:
    """The stream that a configuration describes, from row `position` on.

    Raises:
      ValueError: the task or the files are not there; a DataError if rows of a file are of no use.
      ImportError: a package of the `data` extra is missing.
    """
    source = open_source(config, seed)
    stream = PromptStream(source, tokenizer, config, position)
    if isinstance(source, FileSource):
        stream.check(source)
    return stream


def open_source(config: DataConfig, seed: int) -> Source:
    """The rows that a configuration describes, those of files all checked."""
    if config.source == "reasoning_gym":
        return ReasoningGymSource(config.task, config.task_config, seed)
    paths = _paths(config.path)
    try:
        rows: Rows = (
            JsonLines(paths) if config.source == "jsonl" else Parquet(paths, _columns_of(config))
        )
        return FileSource(rows, config, seed)
    except DataError as error:
        if Path(config.path).is_dir():
            raise DataError(
                f"{error}\n{config.path} is a folder, and all its files are read: if others than "
                f"{config.source} files are among them, give a pattern as data.path, such as "
                f"'{Path(config.path) / ('*.' + config.source)}'"
            ) from None
        raise


class ReasoningGymSource:
    """A procedurally generated task of reasoning-gym.

    Row i is entry i % 1024 of the data set whose seed is drawn from (seed, i // 1024).
    """

    def __init__(self, task: str, task_config: Mapping[str, Any], seed: int) -> None:
        self._task, self._config, self._seed = task, dict(task_config), seed
        self._block = -1
        self._data: Any = None
        reasoning_gym_task(task, task_config)  # an unknown task or setting is an error now

    def row(self, index: int) -> Row:
        block, offset = divmod(index, _BLOCK)
        if block != self._block:
            seed = np.random.SeedSequence([self._seed, block]).generate_state(1)[0]
            self._data = reasoning_gym_task(self._task, self._config, int(seed), _BLOCK)
            self._block = block
        entry = self._data[offset]
        return Row(entry["question"], str(entry["answer"]), entry)


def reasoning_gym_task(
    task: str, task_config: Mapping[str, Any], seed: int = 0, size: int = 1
) -> Any:
    """A reasoning-gym data set.

    Raises:
      ValueError: the task or one of its settings does not exist.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            'data.source = "reasoning_gym" needs: pip install "isojax[data]"'
        ) from error
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **task_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym task {task!r} with {dict(task_config)}: {error}") from None


class Rows(Protocol):
    """A finite table. A row that could not be read is a string that says why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any] | str: ...

    def __iter__(self) -> Iterator[Mapping[str, Any] | str]: ...

    def place(self, index: int) -> str:
        """The file of a row, and where in it."""
        ...


class FileSource:
    """The rows of a finite table, again and again; shuffled anew for every epoch if asked.

    examples: (place, question) of the first row of every order of roles.
    """

    def __init__(self, rows: Rows, config: DataConfig, seed: int) -> None:
        """Look at every row: a bad one would end the run when its turn comes, again and again.

        Raises:
          DataError: there are no rows, or bad ones; it counts them and names the first ten.
        """
        if not len(rows):
            raise DataError(f"{config.path} has no rows")
        self._rows, self._config, self._seed = rows, config, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)
        bad, shown = 0, []
        orders: dict[tuple[str, ...] | None, tuple[str, str | Sequence[Message]]] = {}
        for number, columns in enumerate(rows):
            try:
                question = _parse(columns, config).question
                order = None if isinstance(question, str) else tuple(m["role"] for m in question)
                if order not in orders:
                    orders[order] = (rows.place(number), question)
            except DataError as error:
                bad += 1
                if bad <= _SHOWN:
                    shown.append(f"{rows.place(number)}: {error}")
        if bad:
            more = [f"and {bad - _SHOWN} more"] if bad > _SHOWN else []
            raise DataError(
                f"{config.path}: {bad} of {len(rows)} rows cannot be used:\n  "
                + "\n  ".join(shown + more)
            )
        self.examples = list(orders.values())

    def row(self, index: int) -> Row:
        epoch, offset = divmod(index, len(self._rows))
        if not self._config.shuffle:
            return _parse(self._rows[offset], self._config)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(len(self._rows))
        return _parse(self._rows[int(self._order[offset])], self._config)


class JsonLines:
    """Objects of one or more files, a line each; empty lines are passed over."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the files.

        Raises:
          DataError: one of them is not UTF-8.
        """
        self._rows: list[dict[str, Any] | str] = []
        self._places: list[tuple[Path, int]] = []
        for path in paths:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    try:
                        text = line.decode()
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{path}, line {number}, byte {error.start + 1}: not UTF-8 text"
                        ) from None
                    if text.strip():
                        self._rows.append(self._parse(text))
                        self._places.append((path, number))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any] | str:
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        return iter(self._rows)

    def place(self, index: int) -> str:
        path, number = self._places[index]
        return f"{path}, line {number}"

    @staticmethod
    def _parse(line: str) -> dict[str, Any] | str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"not JSON: {error.msg}, column {error.colno}"
        except (ValueError, RecursionError) as error:  # an integer of too many digits, deep nesting
            return f"not JSON that can be read: {error}"
        return row if isinstance(row, dict) else f"not an object but {_kind(row)}"


class Parquet:
    """Rows of one or more parquet files; of their columns only `columns`, in Arrow's memory."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        """Read the files.

        Raises:
          DataError: one of them is not parquet, or their columns are of different types.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                'data.source = "parquet" needs: pip install "isojax[data]"'
            ) from error
        tables = []
        for path in paths:
            try:
                names = pyarrow.parquet.read_schema(path).names
                kept = [name for name in columns if name in names]
                tables.append(pyarrow.parquet.read_table(path, columns=kept or names))
            except (pyarrow.ArrowException, OSError) as error:  # OSError: pages that are cut short
                raise DataError(f"{path}: {error}") from None
        try:
            self._table = pyarrow.concat_tables(tables, promote_options="default")
        except pyarrow.ArrowException as error:
            raise DataError(f"{paths[0].parent}: the files do not fit together: {error}") from None
        self._paths = paths
        self._ends = np.cumsum([table.num_rows for table in tables])

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any] | str:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            return f"not UTF-8 text: {error}"

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        for start in range(0, len(self), _BATCH):
            try:
                yield from self._table.slice(start, _BATCH).to_pylist()
            except UnicodeDecodeError:
                yield from (self[i] for i in range(start, min(start + _BATCH, len(self))))

    def place(self, index: int) -> str:
        part = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[part - 1]) if part else 0
        return f"{self._paths[part]}, row {index - first + 1}"


def _parse(columns: Mapping[str, Any] | str, config: DataConfig) -> Row:
    """A row of a table.

    Raises:
      DataError: with everything that is wrong with it.
    """
    if isinstance(columns, str):
        raise DataError(columns)
    question: Any = columns.get(config.prompt_column)
    answer: Any = columns.get(config.answer_column)
    problems = [_question_problem(question, config.prompt_column)]
    if answer is not None:
        problems.append(_answer_problem(answer, config.answer_column))
    else:
        model = columns.get("reward_model")
        if model is not None and not isinstance(model, Mapping):
            problems.append(f"reward_model must be a table with ground_truth, not {_kind(model)}")
        else:
            answer = (model or {}).get("ground_truth")
            either = f"{config.answer_column} or reward_model.ground_truth"
            problems.append(_answer_problem(answer, either))
    found = [problem for problem in problems if problem]
    if found:
        absent = any(problem.startswith("no ") for problem in found)
        there = f" (columns: {', '.join(columns)})" if absent else ""
        raise DataError("; ".join(found) + there)
    return Row(question, str(answer), columns)


def _question_problem(question: Any, name: str) -> str | None:
    if question is None:
        return f"no {name}"
    if not isinstance(question, str) and not _are_messages(question):
        return (
            f'{name} must be text or a list of {{"role": ..., "content": ...}}, '
            f"not {_kind(question)}"
        )
    texts = [question] if isinstance(question, str) else [m["content"] for m in question]
    if not any(text.strip() for text in texts):
        return f"{name} is empty"
    return next((f"{name} {problem}" for problem in map(_text_problem, texts) if problem), None)


def _answer_problem(answer: Any, name: str) -> str | None:
    if answer is None or answer != answer:  # NaN is how tables of numbers leave a field out
        return f"no {name}"
    if not isinstance(answer, str | numbers.Number):
        return f"{name} must be text or a number, not {_kind(answer)}"
    problem = _text_problem(str(answer))
    return f"{name} {problem}" if problem else None


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate at character {error.start + 1}, which no tokenizer takes"
    return None


_KINDS = {
    str: "text",
    list: "a list",
    dict: "a table",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value)) or f"of type {type(value).__name__}"


def _columns_of(config: DataConfig) -> list[str]:
    names = (
        config.prompt_column,
        config.answer_column,
        "reward_model",
        "data_source",
        "extra_info",
    )
    return list(dict.fromkeys(names))


def _paths(pattern: str) -> list[Path]:
    """A file, the files of a folder, or the matches of a glob pattern, sorted."""
    path = Path(pattern)
    if path.is_file():
        return [path]
    found = glob.glob(str(path / "*") if path.is_dir() else pattern)
    files = [Path(name) for name in sorted(found) if Path(name).is_file()]
    if not files:
        raise ValueError(f"data.path {pattern!r} names no file")
    return files


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
