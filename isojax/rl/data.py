"""Prompts of a run: an endless stream over reasoning-gym tasks or files, resumed from an index."""

import dataclasses
import glob
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isojax.config import DataConfig
from isojax.tokenizer import Message, Tokenizer

log = logging.getLogger(__name__)

_BLOCK = 1024  # rows that one reasoning-gym data set is made for
_GIVE_UP = 10_000  # rows in a row that may be too long before a stream is called empty


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
          ValueError: 10,000 rows in a row were longer than max_prompt_tokens.
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
                raise ValueError(
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

    def answer_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the right answer and of the end of the response: what a warm start imitates."""
        return (*self._tokenizer.encode(prompt.answer), self._tokenizer.eos_ids[0])

    def _prompt(self, index: int) -> Prompt:
        row = self._source.row(index)
        text = self._render(row.question)
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
      ValueError: the task, the files or their columns are not there.
      ImportError: a package of the `data` extra is missing.
    """
    return PromptStream(open_source(config, seed), tokenizer, config, position)


def open_source(config: DataConfig, seed: int) -> Source:
    """The rows that a configuration describes."""
    if config.source == "reasoning_gym":
        return ReasoningGymSource(config.task, config.task_config, seed)
    paths = _paths(config.path)
    rows: Rows = (
        JsonLines(paths) if config.source == "jsonl" else Parquet(paths, _columns_of(config))
    )
    return FileSource(rows, config, seed)


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
    """A finite table."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class FileSource:
    """The rows of a finite table, again and again; shuffled anew for every epoch if asked."""

    def __init__(self, rows: Rows, config: DataConfig, seed: int) -> None:
        if not len(rows):
            raise ValueError(f"{config.path} has no rows")
        self._rows, self._config, self._seed = rows, config, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._parse(0)  # missing columns are an error now

    def row(self, index: int) -> Row:
        epoch, offset = divmod(index, len(self._rows))
        if not self._config.shuffle:
            return self._parse(offset)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(len(self._rows))
        return self._parse(int(self._order[offset]))

    def _parse(self, number: int) -> Row:
        columns = self._rows[number]
        question: Any = columns.get(self._config.prompt_column)
        answer = columns.get(self._config.answer_column)
        if answer is None:
            answer = (columns.get("reward_model") or {}).get("ground_truth")
        missing = [
            name
            for name, value in (
                (self._config.prompt_column, question),
                (f"{self._config.answer_column} or reward_model.ground_truth", answer),
            )
            if value is None
        ]
        if missing:
            raise ValueError(
                f"{self._config.path}, row {number + 1}: no {' and no '.join(missing)} "
                f"(columns: {', '.join(columns)})"
            )
        if not isinstance(question, str) and not _are_messages(question):
            raise ValueError(
                f"{self._config.path}, row {number + 1}: {self._config.prompt_column} must be text "
                'or a list of {"role": ..., "content": ...}'
            )
        return Row(question, str(answer), columns)


class JsonLines:
    """Objects of one or more files, a line each; empty lines are passed over."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._rows: list[dict[str, Any]] = []
        for path in paths:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        self._rows.append(self._parse(line, path, number))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    @staticmethod
    def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not an object")
        return row


class Parquet:
    """Rows of one or more parquet files; of their columns only `columns`, in Arrow's memory."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
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
            except pyarrow.ArrowException as error:
                raise ValueError(f"{path}: {error}") from None
        self._table = pyarrow.concat_tables(tables, promote_options="default")

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


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
