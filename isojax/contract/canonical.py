"""One byte string for one value: canonical JSON, bit patterns instead of decimal floats, sha256."""

import hashlib
import json
import struct
from typing import Any


class ContractError(ValueError):
    """A contract, or what it is compared with, is refused; the message says why."""


def dumps(value: Any) -> bytes:
    """Canonical JSON: sorted keys, two-space indent, ASCII, one newline at the end.

    Raises:
      ContractError: for a float, which has no canonical decimal form.
    """
    _check(value, "")
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False)
    return (text + "\n").encode("ascii")


def digest(value: Any) -> str:
    """Hex sha256 of bytes, of a string's UTF-8, or of any other value's canonical JSON."""
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        value = dumps(value)
    return hashlib.sha256(value).hexdigest()


def bits(value: Any) -> Any:
    """A constant as its bits: a float becomes ``{"float64": "3eb0c6f7a0b5ed8d"}``.

    Integers, strings, booleans and None are exact already; tuples become lists.
    """
    if isinstance(value, float):
        return {"float64": struct.pack(">d", value).hex()}
    if isinstance(value, (tuple, list)):
        return [bits(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ContractError(f"a constant of type {type(value).__name__} has no declared bit pattern")


def readable(value: Any) -> str:
    """A constant of `bits` for people: floats in decimal, beside their bit pattern."""
    if isinstance(value, dict) and set(value) == {"float64"}:
        pattern = value["float64"]
        return f"{struct.unpack('>d', bytes.fromhex(pattern))[0]!r} (0x{pattern})"
    return json.dumps(value)


def _check(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ContractError(f"{path or '/'}: key {key!r} is not a string")
            _check(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}/{index}")
    elif not (value is None or isinstance(value, (bool, int, str))):
        raise ContractError(f"{path or '/'}: {type(value).__name__} is not allowed in a contract")
