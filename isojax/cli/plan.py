"""Say how much memory of a device a run needs, from its settings alone.

Neither weights nor a device are needed. What XLA allocates besides (kernels' scratch, activations
within a layer) is not counted.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from isojax import config_io
from isojax.arguments import as_layout
from isojax.config import resolve_model
from isojax.contract.claims import check_mesh
from isojax.memory import plan, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--config, --mesh, --json."""
    parser.add_argument("--config", type=Path, required=True, help="settings of a run (TOML)")
    parser.add_argument(
        "--mesh", type=as_layout, metavar="DxM", help="instead of the mesh of the settings"
    )
    parser.add_argument("--json", action="store_true", help="bytes, as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
      ValueError: the settings are not those of a run, or the mesh is not admitted.
    """
    config = config_io.load(args.config)
    if args.mesh is not None:
        config = dataclasses.replace(config, mesh=args.mesh)
    check_mesh(resolve_model(config), config.policy, config.mesh)
    parts = plan(config)
    print(json.dumps(parts) if args.json else "\n".join(table(parts)))
    return 0
