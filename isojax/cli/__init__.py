"""The `isojax` command: one subcommand a module, each with `add_arguments` and `run`."""

import argparse
import logging
import sys
from collections.abc import Sequence

from isojax import __version__
from isojax.arguments import Parser
from isojax.cli import export, generate, plan, score
from isojax.contract import command as contract
from isojax.contract import selfcheck as verify

COMMANDS = {
    "score": score,
    "generate": generate,
    "export": export,
    "plan": plan,
    "contract": contract,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status: 0, 1 if a part of the input failed, 2 if nothing ran."""
    parser = Parser(
        prog="isojax",
        description="One forward for rollout and trainer: bit-for-bit equal log-probabilities.",
    )
    parser.add_argument("--version", action="version", version=f"isojax {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = subparsers.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    args, rest = parser.parse_known_args(argv)
    if rest:
        subparsers.choices[args.command].unknown(rest[0])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("isojax").setLevel(logging.INFO)
    try:
        return COMMANDS[args.command].run(args)
    except (OSError, ValueError) as error:
        print(f"isojax {args.command}: {error}", file=sys.stderr)
        return 2
