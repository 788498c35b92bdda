"""What a command that runs a model is given: a checkpoint, a precision, a mesh, two files."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import Mesh

from isojax.arguments import as_layout, provide_devices
from isojax.cli.jsonl import BadLine
from isojax.files import json_object
from isojax.mesh import Layout
from isojax.models import hf
from isojax.models.config import ModelConfig
from isojax.models.params import Params
from isojax.numerics.policy import DTypeName, Policy
from isojax.ops.kernel import check_device
from isojax.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--checkpoint, --input, --output, --dtype, --mesh."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint"
    )
    parser.add_argument("--input", type=Path, required=True, metavar="F.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="G.jsonl")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="precision of weights and activations (default: float32 if the checkpoint's dtype "
        "is float32, else bfloat16)",
    )
    parser.add_argument(
        "--evaluation",
        choices=("reference", "mosaic"),
        default="reference",
        help="plain jax on any device (default), or kernels for NVIDIA Hopper GPUs: other bits",
    )
    parser.add_argument(
        "--mesh",
        type=as_layout,
        default=Layout(),
        metavar="DxM",
        help="data ranks x model ranks (default: 1x1); it cannot change a bit of the output",
    )


@dataclasses.dataclass(frozen=True)
class Session:
    """A loaded model. tokenizer: None if the checkpoint has none."""

    config: ModelConfig
    params: Params
    policy: Policy
    layout: Layout
    mesh: Mesh
    tokenizer: Tokenizer | None

    @classmethod
    def start(cls, args: argparse.Namespace) -> "Session":
        """Load what the arguments name.

        Raises:
          ValueError, OSError: if they do not name a model, or input and output are one file.
        """
        if args.output.exists() and args.output.samefile(args.input):
            raise ValueError(f"--output would overwrite --input {args.input}")
        if not args.output.absolute().parent.is_dir():
            raise ValueError(f"--output {args.output} is in no folder that exists")
        folder, layout = args.checkpoint, args.mesh
        provide_devices(layout)
        policy = Policy(args.evaluation, args.dtype or _stored_dtype(folder))
        check_device(policy)
        mesh = layout.mesh()
        config, params = hf.load(folder, mesh, layout, policy)
        tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
        return cls(config, params, policy, layout, mesh, tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
          BadLine: if there is no tokenizer.
        """
        if self.tokenizer is None:
            raise BadLine("text needs a tokenizer, and the checkpoint has no tokenizer.json")
        return self.tokenizer.encode(text)


def _stored_dtype(folder: Path) -> DTypeName:
    """float32 if config.json says that the checkpoint is, else bfloat16."""
    config = json_object(folder / hf.CONFIG)
    for section in (config.get("text_config") or {}, config):
        if not isinstance(section, Mapping):
            continue  # the model's config says so, where it is read
        stored = section.get("dtype") or section.get("torch_dtype")
        if stored:
            return "float32" if stored == "float32" else "bfloat16"
    return "bfloat16"
