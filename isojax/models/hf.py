"""Hugging Face checkpoints: load them straight into the shards of a mesh, and save ones
transformers loads.

`load` maps the files and gives each device the rows that its shard holds, cast as they are read;
the host never holds more than the shard in hand. `save` streams one tensor at a time.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from isojax.files import json_object
from isojax.mesh import Layout
from isojax.models import qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next, safetensors
from isojax.models.config import ModelConfig
from isojax.models.mapping import Part, Tensors
from isojax.models.params import Parameter, Params, parameters
from isojax.models.placement import place
from isojax.numerics.policy import Policy

log = logging.getLogger(__name__)

FAMILIES: dict[str, ModuleType] = {
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SOURCE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))
SHARD_BYTES = 5 * 10**9

# The published vision-language form keeps the text model one level deeper, beside what this
# library leaves out: the vision tower and the multi-token-prediction head. Old checkpoints also
# store rotary frequencies.
TEXT_PREFIX = "model.language_model."
SKIPPED = re.compile(r"(model\.)?visual\.|(model\.)?mtp\.|.*rotary_emb\.inv_freq$")


class CheckpointError(ValueError):
    """A checkpoint does not hold the model of its config; the message lists every tensor."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint as a piece of a parameter.

    part: how the tensor holds it. name, shape: the tensor's. at: the leading indices of the
    parameter that it fills: none outside the layers, (period,), or (period, expert).
    """

    parameter: Parameter
    part: Part
    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]


def pieces(tree: Params, config: ModelConfig, parts: dict[str, Part]) -> Iterator[Piece]:
    """Every piece of every parameter, layers in order, where `parts` says how each is stored."""
    for parameter in jax.tree.leaves(tree):
        if parameter.position is None:
            part = parts[parameter.key]
            shape = part.tensor_shape(parameter.shape)
            yield Piece(parameter, part, part.name, shape, ())
    for layer in range(config.num_layers):
        period, position = divmod(layer, config.period)
        for parameter in jax.tree.leaves(tree["layers"][position]):
            part, shape = parts[parameter.key], parameter.shape[1:]
            if not part.per_expert:
                name = part.name.format(layer=layer)
                yield Piece(parameter, part, name, part.tensor_shape(shape), (period,))
                continue
            for expert in range(shape[0]):
                name = part.name.format(layer=layer, expert=expert)
                at = (period, expert)
                yield Piece(parameter, part, name, part.tensor_shape(shape[1:]), at)


def _tensors_of(config: ModelConfig) -> Tensors:
    return FAMILIES[config.model_type].tensors(config)


def load(
    folder: str | os.PathLike[str], mesh: Mesh, layout: Layout, policy: Policy
) -> tuple[ModelConfig, Params]:
    """Read a checkpoint: config.json, and tensors in model.safetensors or in shards with an index.

    Tensors in float32, bfloat16 or float16 are cast to the parameters' dtype (rounding to nearest,
    ties to even). Returns the model's config and its parameters, placed on the mesh.

    Raises:
      CheckpointError: if tensors are missing, left over, or of another shape or dtype than the
        config says.
      ValueError: if the config, or the mesh for this model, is not supported, or a file is damaged.
      FileNotFoundError: if the folder has no checkpoint.
    """
    folder = Path(folder)
    config = load_config(folder)
    tree = parameters(config, policy, layout)
    tensors = _text_model(_open(folder), config)
    parts = {key: _stored_form(forms, tensors) for key, forms in _tensors_of(config).items()}
    plan = list(pieces(tree, config, parts))
    _check(folder, plan, tensors)
    blocks = {(p.parameter.name, *p.at): p for p in plan}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:

        def build(parameter: Parameter) -> jax.Array:
            def read(at: tuple[int, ...], rest: tuple[slice, ...]) -> np.ndarray:
                piece = blocks[parameter.name, *at]
                return piece.part.view(tensors[piece.name])[_tensor_index(piece, rest)]

            leading = next(len(p.at) for p in plan if p.parameter is parameter)
            return place(parameter, mesh, leading, read, pool)

        return config, jax.tree.map(build, tree)


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The ModelConfig that a checkpoint's config.json describes.

    Raises:
      ValueError, FileNotFoundError: it describes none, or there is no such file.
    """
    described = json_object(Path(folder) / CONFIG)
    try:
        return ModelConfig.from_hf(described)
    except ValueError as error:  # which begins with the file's name
        raise ValueError(f"{Path(folder)}/{error}") from None


def _open(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint as lazy views, in whatever files they are."""
    if (folder / INDEX).exists():
        weight_map = json_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX}: its weight_map names no tensors")
        if odd := [file for file in weight_map.values() if not isinstance(file, str)]:
            raise ValueError(f"{folder / INDEX}: {odd[0]!r} in its weight_map is no file name")
        if absent := sorted({f for f in weight_map.values() if not (folder / f).is_file()}):
            raise FileNotFoundError(f"{folder} lacks files that {INDEX} names: {', '.join(absent)}")
        files = {
            name: safetensors.open_file(folder / name) for name in sorted(set(weight_map.values()))
        }
        # what the index promises and a file lacks is left out here, and reported as missing
        return {name: files[file][name] for name, file in weight_map.items() if name in files[file]}
    if (folder / WEIGHTS).exists():
        return safetensors.open_file(folder / WEIGHTS)
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def _text_model(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The text model's tensors under the names they have in a text-only checkpoint."""
    skipped = [name for name in tensors if SKIPPED.match(name)]
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        skipped.append("lm_head.weight")
    if skipped:
        log.info(
            "skipped %d tensors that the text model does not use: %s", len(skipped), _names(skipped)
        )
    kept = (name for name in tensors if name not in set(skipped))
    return {name.replace(TEXT_PREFIX, "model.", 1): tensors[name] for name in kept}


def _names(names: Sequence[str]) -> str:
    """Names by their first parts: what a reader of the log can take in."""
    groups: dict[str, int] = {}
    for name in names:
        group = re.split(r"\.\d+\.", name)[0]
        groups[group] = groups.get(group, 0) + 1
    return ", ".join(
        group if count == 1 else f"{group}.* ({count})" for group, count in groups.items()
    )


def _stored_form(parts: tuple[Part, ...], tensors: dict[str, np.ndarray]) -> Part:
    """The first of a parameter's forms of which the checkpoint has any tensor."""
    for part in parts if len(parts) > 1 else ():
        pattern = re.compile(
            re.escape(part.name).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
        )
        if any(map(pattern.fullmatch, tensors)):
            return part
    return parts[0]


def _check(folder: Path, plan: Sequence[Piece], tensors: dict[str, np.ndarray]) -> None:
    expected = {piece.name: piece.shape for piece in plan}
    problems = [
        f"  missing: {name} {list(shape)}"
        for name, shape in expected.items()
        if name not in tensors
    ]
    problems += [
        f"  surplus: {name} {list(t.shape)}" for name, t in tensors.items() if name not in expected
    ]
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            problems.append(
                f"  shape: {name} is {list(tensor.shape)}, the config says {list(shape)}"
            )
        if tensor is not None and tensor.dtype not in SOURCE_DTYPES:
            problems.append(f"  dtype: {name} is {tensor.dtype}, not float32, bfloat16 or float16")
    if problems:
        raise CheckpointError(
            f"{folder} does not hold the model of its config.json; tensors that differ: "
            f"{len(problems)}\n" + "\n".join(problems)
        )


def _indexer(rows: np.ndarray) -> slice | np.ndarray:
    """Row numbers as a slice where they are consecutive, so that numpy makes a view."""
    first = int(rows[0]) if len(rows) else 0
    consecutive = np.array_equal(rows, np.arange(first, first + len(rows)))
    return slice(first, first + len(rows)) if consecutive else rows


def _tensor_index(piece: Piece, block: tuple[slice, ...]) -> tuple[slice | np.ndarray, ...]:
    """Where a block of a parameter (of one period, one expert) stands in the view of its tensor."""
    parameter, axis = piece.parameter, piece.part.row_axis % len(block)
    sides = parameter.shape[len(parameter.shape) - len(block) :]
    rows = piece.part.rows(sides[axis])
    index: list[slice | np.ndarray] = list(block)
    index[axis] = _indexer(rows[block[axis]])
    return tuple(index)


def save(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a text-only checkpoint that transformers loads: config.json and tensors, in shards if
    large.

    Tensors keep the parameters' dtype; experts are stored one tensor each. A shard holds at most
    `shard_bytes` bytes, or one tensor.

    Raises:
      ValueError: if the parameters are not this model's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer.of(config, params)
    shards = _split(writer.entries(), shard_bytes)
    weight_map: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        file = (
            WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        safetensors.write_file(folder / file, entries, writer.tensor)
        weight_map |= {name: file for name, _, _ in entries}
    # a reader looks for one of these two: the other, if an earlier save left it, must go
    if len(shards) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    else:
        (folder / WEIGHTS).unlink(missing_ok=True)
        total = sum(_bytes(entry) for entry in writer.entries())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    text = json.dumps(config.to_hf(str(params["embed"].dtype)), indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n")


Entry = tuple[str, np.dtype, tuple[int, ...]]  # name, dtype and shape of a tensor to write


def _bytes(entry: Entry) -> int:
    _, dtype, shape = entry
    return math.prod(shape) * dtype.itemsize


def _split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Entries in order, cut into shards of at most `limit` bytes or one entry."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + _bytes(entry) > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += _bytes(entry)
    return shards


@dataclass
class _Writer:
    """Assembles tensors from parameters; asked layer by layer, it fetches each array of a layer
    once."""

    plan: dict[str, list[Piece]]
    arrays: dict[str, jax.Array]
    period: tuple[int, ...] = ()
    fetched: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig, params: Params) -> "_Writer":
        tree = parameters(config, Policy(), Layout())
        given, expected = jax.tree.structure(params), jax.tree.structure(tree)
        if str(given) != str(expected):
            raise ValueError(f"the parameters are {given}, this config has {expected}")
        arrays, stored = {}, []
        for parameter, array in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
            if array.shape != parameter.shape:
                name, shape = parameter.name, parameter.shape
                raise ValueError(f"{name} is {list(array.shape)}, the config says {list(shape)}")
            arrays[parameter.name] = array
            stored.append(replace(parameter, dtype=np.dtype(array.dtype)))
        tree = jax.tree.unflatten(expected, stored)
        parts = {key: forms[0] for key, forms in _tensors_of(config).items()}
        plan: dict[str, list[Piece]] = {}
        for piece in pieces(tree, config, parts):
            plan.setdefault(piece.name, []).append(piece)
        return cls(plan, arrays)

    def entries(self) -> list[Entry]:
        return [(name, of[0].parameter.dtype, of[0].shape) for name, of in self.plan.items()]

    def tensor(self, name: str) -> np.ndarray:
        """The tensor, all its pieces filled in."""
        first = self.plan[name][0]
        tensor = np.empty(first.shape, first.parameter.dtype)
        for piece in self.plan[name]:
            block = self.block(piece)
            view, whole = piece.part.view(tensor), tuple(slice(0, side) for side in block.shape)
            view[_tensor_index(piece, whole)] = block
        return tensor

    def block(self, piece: Piece) -> np.ndarray:
        """A piece's values."""
        period, expert = piece.at[:1], piece.at[1:]
        if period != self.period:
            self.period, self.fetched = period, {}
        name = piece.parameter.name
        if name not in self.fetched:
            array = self.arrays[name]
            for index in period:  # an operand, so that one compilation does for all periods
                array = lax.dynamic_index_in_dim(array, index, keepdims=False)
            self.fetched[name] = np.asarray(array)
        return self.fetched[name][expert]
