"""Compare rollout engine and trainer bit by bit on this machine.

The engine generates from random prompts in prefill, decode and mixed calls, and the trainer scores
what it generated, without a gradient and inside one. If a bit differs the exit status is 1, and the
first layer and op where the two part are named.
"""

import argparse
import dataclasses
from pathlib import Path

from isojax import config_io
from isojax.arguments import as_layout, provide_devices
from isojax.config import RunConfig, resolve_model
from isojax.contract import canary, claims
from isojax.contract.bisect import Bisector
from isojax.contract.startup import bisected
from isojax.models import hf
from isojax.models.init import init_params
from isojax.sampler.settings import engine_config, executor
from isojax.trainer import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--config", required=True, type=Path, help="settings of a run (TOML)")
    parser.add_argument("--checkpoint", help="weights (default: the config's, else random)")
    parser.add_argument("--mesh", type=as_layout, metavar="DxM", help="default: the config's")
    parser.add_argument(
        "--bisect", action="store_true", help="follow a sequence op by op, even if nothing parts"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and say by the exit status whether all bits agree."""
    config = config_io.load(arguments.config)
    changed = {"checkpoint": arguments.checkpoint, "mesh": arguments.mesh}
    config = dataclasses.replace(config, **{k: v for k, v in changed.items() if v})
    provide_devices(config.mesh)
    exact, lines = self_check(config, bisect=arguments.bisect)
    print("\n".join(lines))
    return int(not exact)


def self_check(config: RunConfig, *, bisect: bool) -> tuple[bool, list[str]]:
    """Whether all bits agree, and what to print.

    bisect: follow the first sequence that parts, or else one that does not, op by op.
    """
    model, policy, layout = resolve_model(config), config.policy, config.mesh
    claims.check_mesh(model, policy, layout)
    mesh = layout.mesh()
    if config.checkpoint:
        _, params = hf.load(config.checkpoint, mesh, layout, policy)
    else:
        params = init_params(model, policy, layout, mesh, config.seed)
    engine = engine_config(config)
    runs = executor(config, model, mesh, params)
    found = canary.check(
        runs, engine, settings.scorer(config, model, mesh), settings.trainer(config, model, mesh),
        settings.policy_loss(config), params,
        vocab=model.vocab_size, chunk=policy.chunk, ranks=layout.data,
    )  # fmt: skip
    runs.release()
    lines = [canary.describe(found)]
    bisector = Bisector(model, policy, layout, mesh, params)
    if found.first is not None:
        lines.append(bisected(bisector, found.first))
    elif bisect:
        request = canary.requests(engine, policy.chunk, model.vocab_size, layout.data, 0)[0]
        tokens = canary.tokens_of(request)
        where = bisector.find(tokens, max(1, len(tokens) - 4))
        exact = where is None
        lines.append("op by op: every row equal" if exact else f"first difference: {where}")
        return exact, lines
    return found.exact, lines
