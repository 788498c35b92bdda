"""DAPO with rollouts and trainer in bit-for-bit agreement: the main job.

Without arguments: a tiny mixture of experts on a CPU, a supervised warm start, then DAPO, in about
five minutes. Every setting can be given on the command line (`--sampler.max-tokens 64`).
"""

import argparse
import logging
import sys
from pathlib import Path

from isojax.config_io import add_arguments, load, parse_arguments
from isojax.contract.canonical import ContractError
from isojax.rl.loop import DisagreementError, NotFiniteError, Run

TINY = Path(__file__).parents[1] / "configs" / "tiny.toml"


def main(arguments: list[str]) -> int:
    """Run the job; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="settings (default: configs/tiny.toml)")
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with a run")
    parser.add_argument(
        "--contract", metavar="FILE", type=Path, help="pinned contract: refuse to start without it"
    )
    parser.add_argument(
        "--accept-contract-change",
        action="store_true",
        help="resume although the checkpoint was written under another contract",
    )
    add_arguments(parser)
    own, overrides = parse_arguments(parser, arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    path = own.config or TINY
    if own.resume:
        path = own.resume / "config.toml"
        overrides |= {"runs_dir": str(own.resume.parent), "name": own.resume.resolve().name}
    try:
        run = Run(
            load(path, overrides),
            resume=own.resume is not None,
            accept_contract_change=own.accept_contract_change,
            pinned=own.contract,
            known=Path(path).with_suffix(".contract.json"),
        )
    except (ContractError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = run.config.folder
    try:
        run.run()
    except KeyboardInterrupt:
        print(f"stopped; go on with: --resume {folder}", file=sys.stderr)
        return 130
    except (ContractError, DisagreementError, NotFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
