"""DAPO with rollouts and trainer in bit-for-bit agreement: the main job.

Without arguments: a tiny mixture of experts on a CPU, a supervised warm start, then DAPO, in about
five minutes. Every setting can be given on the command line (`--sampler.max-tokens 64`).

On several processes the same command is started for each: by srun or mpirun, which say who is who,
or with --coordinator, --processes and --process.
"""

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from isojax import distributed
from isojax.config_io import add_arguments, load, parse_arguments
from isojax.contract.canonical import ContractError
from isojax.distributed import MismatchError
from isojax.report.metrics import MetricsError
from isojax.rl.data import DataError
from isojax.rl.loop import DisagreementError, NotFiniteError, Run, finished
from isojax.trainer.checkpoint import CheckpointError

# what a user mends; a ValueError of another kind is a defect and keeps its traceback
USER_ERRORS = (DataError, MetricsError, OSError, ImportError)
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
    distributed.add_arguments(parser)
    add_arguments(parser)
    own, overrides = parse_arguments(parser, arguments)
    try:
        distributed.join(own.cluster, own.coordinator, own.processes, own.process, own.lost_after)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    level = logging.WARNING if distributed.first() else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        return job(own, overrides)
    except (Exception, KeyboardInterrupt) as error:
        if distributed.count() == 1:
            raise
        traceback.print_exc()
        return distributed.fail(f"{type(error).__name__}: {error}", 1)


def job(own: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """The run that the arguments ask for; the exit status."""
    path = own.config or TINY
    if own.resume:
        folder = Path(os.path.abspath(own.resume))  # "." has neither a name nor a parent
        path = folder / "config.toml"
        overrides |= {"runs_dir": str(folder.parent), "name": folder.name}
    try:
        config = load(path, overrides)
        if own.resume and finished(config):
            say(f"finished: {config.folder} has its {config.steps} steps; --steps N goes on to N")
            return distributed.leave(0)
        run = Run(
            config,
            resume=own.resume is not None,
            accept_contract_change=own.accept_contract_change,
            pinned=own.contract,
            known=Path(path).with_suffix(".contract.json"),
        )
    except (
        ContractError, CheckpointError, MismatchError, ValueError, OSError, ImportError,
    ) as error:  # fmt: skip
        return distributed.fail(str(error), 2)
    folder = run.config.folder
    distributed.advise(f"go on with: --resume {folder}")
    try:
        run.run()
    except KeyboardInterrupt:
        if not distributed.arrive():
            return distributed.fail("stopped amid a step", 130)
        say(f"stopped; go on with: --resume {folder}", sys.stderr)
        return distributed.leave(130)
    except (
        ContractError, DisagreementError, MismatchError, NotFiniteError, *USER_ERRORS,
    ) as error:  # fmt: skip
        return distributed.fail(str(error), 1)
    say(f"done: {folder}")
    return distributed.leave(0)


def say(text: str, file: TextIO | None = None) -> None:
    """Print once, however many processes there are."""
    if distributed.first():
        print(text, file=file or sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
