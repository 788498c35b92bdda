"""The safetensors format: tensors as lazy views of mapped files, and a writer that streams.

A file is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape, byte
range of the data that follows), and the tensors' bytes, row-major and little-endian. Mapping the
file costs no memory
of its own: a shard reads just the rows that it holds, in whatever order they stand in the file.
Format: https://huggingface.co/docs/safetensors
"""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def open_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of one file as read-only views of its mapping; no data is read yet.

    Raises:
      ValueError: if the file is no safetensors file, is cut short, or holds a dtype that is not
        known.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path}: {size} bytes are no safetensors file")
    data = np.memmap(path, np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > size - 8:
        raise ValueError(f"{path}: its header would take {length} bytes, the file has {size}")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        entries = {name: _entry(name, entry) for name, entry in header.items()}
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the header is not safetensors JSON ({error})") from None
    tensors = {}
    for name, (code, shape, begin, end) in entries.items():
        if code not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {code}, which is not known here")
        dtype = DTYPES[code]
        count = math.prod(shape) * dtype.itemsize
        if end - begin != count or 8 + length + end > size:
            raise ValueError(
                f"{path}: {name} {code}{list(shape)} does not fit bytes {begin} to {end}"
            )
        tensors[name] = data[8 + length + begin : 8 + length + end].view(dtype).reshape(shape)
    return tensors


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's dtype, shape, and the two ends of its bytes, as its entry in the header says.

    Raises:
      ValueError: if it does not say them.
    """
    fields = entry if isinstance(entry, dict) else {}
    code, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or not _sizes(shape) or not _sizes(span) or len(span) != 2:
        raise ValueError(f"{name} is {json.dumps(entry)[:100]}")
    return code, tuple(shape), span[0], span[1]


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def write_file(
    path: str | os.PathLike[str],
    entries: Sequence[tuple[str, np.dtype, tuple[int, ...]]],
    tensor: Callable[[str], np.ndarray],
) -> None:
    """Write a file whose tensors `tensor(name)` gives, asked for one at a time in the order of
    `entries`.

    The file appears under its name only when it is complete.

    Raises:
      ValueError: if a tensor's dtype or shape is not what its entry says.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in entries:
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8 bytes
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in entries:
            array = tensor(name)
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(
                    f"{name}: {array.dtype}{list(array.shape)} is not {dtype}{list(shape)}"
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    os.replace(partial, path)
