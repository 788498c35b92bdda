"""Frozen dataclasses from TOML and the command line, and back.

Every leaf of a dataclass tree has a dotted name. A TOML file gives it as a key of a table, the
command line as `--table.key VALUE` with dashes for underscores. Help texts are the `name: text`
lines of the dataclasses' docstrings.
"""

import argparse
import copy
import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isojax.config import RunConfig

_PREFIX = "config:"  # marks the options of `add_arguments` in a parsed namespace


class ConfigError(ValueError):
    """Settings that do not make a run; the message names every one of them."""


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A run's settings from a TOML file, with dotted names overridden.

    overrides: {"sampler.max_tokens": 64}; values have the types that TOML would give.

    Raises:
      ConfigError: unknown keys (with the nearest known one), wrong types, impossible values; it
        says whether they are the file's or the command line's, which overrides stand for.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
    written = copy.deepcopy(table)
    for name, value in (overrides or {}).items():
        *tables, key = name.split(".")
        inner = table
        for part in tables:
            inner = inner.setdefault(part, {})
        inner[key] = value
    try:
        return build(RunConfig, table)
    except ConfigError as error:
        raise ConfigError(_blame(str(error), path, written, overrides)) from None


def _blame(
    problem: str,
    path: str | Path | None,
    written: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
) -> str:
    """A problem and where it comes from: the file as it is `written`, overrides, or the two."""
    if path is None:
        return problem
    if not overrides:
        return f"{path}: {problem}"
    try:
        build(RunConfig, written)
    except ConfigError as error:
        both = str(error) != problem
        return f"{path}{' with the command line' if both else ''}: {problem}"
    return f"command line: {problem}"


def build[T](cls: type[T], table: Mapping[str, Any]) -> T:
    """An instance of a dataclass from nested tables.

    Raises:
      ConfigError: with every unknown key, missing key and wrong type.
    """
    problems: list[str] = []
    instance = _build(cls, table, "", problems)
    if instance is None or problems:
        raise ConfigError("; ".join(problems))
    return instance


def to_toml(config: Any) -> str:
    """TOML text from which `load` gives back an equal object. None is left out."""
    scalars, tables = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append(_table(field.name, value))
        elif value is not None:
            scalars.append(f"{field.name} = {_toml_value(value)}\n")
    return "".join(scalars) + "".join(tables)


def add_arguments(parser: argparse.ArgumentParser, cls: type = RunConfig) -> None:
    """Give `parser` an option for every leaf of a dataclass tree, grouped by table."""
    parser.usage = parser.usage or "%(prog)s [options]"  # all of them would bury an error
    groups: dict[str, Any] = {}
    for name, hint, text in leaves(cls):
        table = name.rpartition(".")[0]
        if table not in groups:
            groups[table] = parser.add_argument_group(f"[{table}]" if table else "run")
        kinds = _members(hint)
        if bool in kinds:
            arity: dict[str, Any] = dict(nargs="?", const="true")
        else:
            arity = dict(nargs="*") if typing.get_origin(kinds[0]) is tuple else {}
        groups[table].add_argument(
            "--" + name.replace("_", "-"),
            dest=_PREFIX + name,
            default=argparse.SUPPRESS,
            metavar=_describe(hint).upper().replace(" ", "_"),
            help=text.replace("%", "%%"),
            **arity,
        )


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Iterable[str], cls: type = RunConfig
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse a command line of a parser that `add_arguments` was called on.

    Returns the namespace of the parser's own options, and the overrides for `load`. An unknown
    option ends the program, as argparse's own errors do, and the message names the nearest one.
    """
    known = {f"--{name.replace('_', '-')}" for name, _, _ in leaves(cls)}
    own = {option for action in parser._actions for option in action.option_strings}
    words = [_dashed(word, known) for word in arguments]
    namespace, rest = parser.parse_known_args(words)
    if rest:
        option = rest[0].split("=")[0]
        parser.error(f"unknown option {option}{_suggest(option, known | own)}")
    hints = {name: hint for name, hint, _ in leaves(cls)}
    overrides = {}
    for key in [key for key in vars(namespace) if key.startswith(_PREFIX)]:
        name = key.removeprefix(_PREFIX)
        value = getattr(namespace, key)
        delattr(namespace, key)
        try:
            overrides[name] = _from_text(value, hints[name])
        except ValueError as error:
            parser.error(f"--{name.replace('_', '-')}: {error}")
    return namespace, overrides


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, type, help text) of every leaf of a dataclass tree."""
    hints, texts = typing.get_type_hints(cls), _field_texts(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], prefix + field.name
        nested = [kind for kind in _members(hint) if dataclasses.is_dataclass(kind)]
        if nested:
            yield from leaves(typing.cast(type, nested[0]), name + ".")
        else:
            yield name, hint, texts.get(field.name, "")


def _build[T](cls: type[T], table: Any, prefix: str, problems: list[str]) -> T | None:
    if not isinstance(table, Mapping):
        problems.append(f"{prefix.rstrip('.')}: expected a table, got {_quote(table)}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    before = len(problems)
    for key in table:
        if key not in fields:
            problems.append(f"unknown key {prefix + key}{_suggest(key, fields, prefix)}")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(table[name], hints[name], prefix + name, problems)
        elif field.default is field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix + name} is missing")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        named = str(error).split(maxsplit=1)[:1]
        # a message that begins with a field's name is completed to the option's
        where = prefix if named and named[0] in fields else f"[{prefix.rstrip('.')}] "
        problems.append(f"{where if prefix else ''}{error}")
        return None


def _convert(value: Any, hint: Any, name: str, problems: list[str]) -> Any:
    """`value` as TOML gives it, checked against a type."""
    for kind in _members(hint):
        origin = typing.get_origin(kind)
        if kind is type(None):
            continue
        if dataclasses.is_dataclass(kind):
            return _build(typing.cast(type, kind), value, name + ".", problems)
        if origin is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(kind)[0]
            return tuple(
                _convert(item, inner, f"{name}[{i}]", problems) for i, item in enumerate(value)
            )
        if origin is typing.Literal and value in typing.get_args(kind):
            return value
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (bool, int, str) and type(value) is kind:
            return value
    if value is None and type(None) in _members(hint):
        return None
    suggestion = ""
    if typing.get_origin(hint) is typing.Literal and isinstance(value, str):
        suggestion = _suggest(value, typing.get_args(hint))
    problems.append(f"{name}: expected {_describe(hint)}, got {_quote(value)}{suggestion}")
    return None


def _from_text(text: Any, hint: Any) -> Any:
    """A command line's word (or words) as the value that TOML would hold; strings stay strings."""
    for kind in _members(hint):
        origin = typing.get_origin(kind)
        if origin is tuple:
            return [_from_text(word, typing.get_args(kind)[0]) for word in text]
        if kind is type(None) and text.lower() == "none":
            return None
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind is str or (origin is typing.Literal and text in typing.get_args(kind)):
            return text
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if origin is dict:
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict):
                return value
    raise ValueError(f"expected {_describe(hint)}, got {text!r}")


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        # None last: a value is read as something wherever it can be
        return tuple(sorted(typing.get_args(hint), key=lambda kind: kind is type(None)))
    return (hint,)


_WORDS = {bool: "true or false", int: "integer", float: "number", str: "string"}


def _describe(hint: Any) -> str:
    names = []
    for kind in _members(hint):
        origin = typing.get_origin(kind)
        if kind is type(None):
            names.append("none")
        elif origin is tuple:
            names.append(f"list of {_describe(typing.get_args(kind)[0])}")
        elif origin is typing.Literal:
            names.append(" or ".join(str(choice) for choice in typing.get_args(kind)))
        elif origin is dict:
            names.append("table")
        else:
            names.append(_WORDS.get(kind, "table"))
    return " or ".join(names)


def _quote(value: Any) -> str:
    return json.dumps(value, default=str)


def _suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word.replace("-", "_"), list(known), n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {prefix + near[0]}?)" if near else ""


def _dashed(word: str, known: set[str]) -> str:
    """`--sampler.max_tokens=3` as `--sampler.max-tokens=3`, where that is an option."""
    option, equals, value = word.partition("=")
    dashed = option.replace("_", "-")
    return dashed + equals + value if dashed in known else word


def _field_texts(cls: type) -> dict[str, str]:
    """The `name: text` paragraphs of a dataclass's docstring."""
    names = "|".join(field.name for field in dataclasses.fields(cls))
    texts: dict[str, str] = {}
    current = None
    for line in (cls.__doc__ or "").splitlines():
        match = re.match(rf"\s*({names}): (.*)", line)
        if match:
            current = match[1]
            texts[current] = match[2].strip()
        elif current and line.strip():
            texts[current] += " " + line.strip()
        else:
            current = None
    return texts


def _table(name: str, value: Any) -> str:
    scalars, tables = [], []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            tables.append(_table(f"{name}.{field.name}", inner))
        elif inner is not None:
            scalars.append(f"{field.name} = {_toml_value(inner)}\n")
    return f"\n[{name}]\n" + "".join(scalars) + "".join(tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which only TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{_toml_value(str(k))} = {_toml_value(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    return "[" + ", ".join(_toml_value(item) for item in value) + "]"
