"""`python -m isojax.contract VERB`: the contract command by itself."""

import argparse
import sys

from isojax.arguments import Parser
from isojax.contract import command


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; exit status 2 is a refusal."""
    parser = Parser(
        prog="python -m isojax.contract",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        return command.run(parsed)
    except (OSError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
