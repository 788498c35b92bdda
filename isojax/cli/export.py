"""Write a checkpoint of a run as a Hugging Face folder, with the run's tokenizer.

What is written loads in transformers, and in `isojax generate --checkpoint DIR`. Checkpoints are
numbered by steps done, those of the warm start included. The run may still be going on. The host's
memory must hold the weights in float32.
"""

import argparse
import shutil
from pathlib import Path

import jax

from isojax import config_io
from isojax.config import RunConfig, resolve_model
from isojax.models import hf
from isojax.tokenizer import TINY
from isojax.trainer.checkpoint import load_weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
GENERATION = "generation_config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `isojax export`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")


def run(args: argparse.Namespace) -> int:
    """Write the folder.

    Raises:
      FileNotFoundError: there is no run, or no such checkpoint.
      FileExistsError: the folder holds something already.
    """
    jax.config.update("jax_platforms", "cpu")  # the run may be using the other devices
    settings = args.run / "config.toml"
    if not settings.is_file():
        raise FileNotFoundError(f"{args.run} is not the folder of a run: it has no config.toml")
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        raise FileExistsError(f"{args.folder} exists already, and is not an empty folder")
    config = config_io.load(settings)
    model = resolve_model(config)
    step, params = load_weights(args.run / "checkpoints", model, config.policy, args.step)
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in _beside(config):
        shutil.copy(file, args.folder)
    hf.save(args.folder, model, params)
    print(f"{args.folder}: the weights of {args.run} after step {step}")
    return 0


def _beside(config: RunConfig) -> list[Path]:
    """What else a reader of the run's model needs.

    Raises:
      FileNotFoundError: the run's tokenizer is not where it was.
    """
    source = Path(config.data.tokenizer or config.checkpoint or TINY)
    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"the run's tokenizer is gone: {source} has no tokenizer.json")
    files = [source / name for name in TOKENIZER_FILES]
    if config.checkpoint:
        files.append(Path(config.checkpoint) / GENERATION)
    return [file for file in files if file.is_file()]
