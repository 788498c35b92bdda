"""One of several processes, for test_processes.

    python -m tests.process_worker run OPTIONS       the main job, recording what it samples
    python -m tests.process_worker loop OPTIONS      no model: 200 common steps of 50 ms

With ACCIDENT=KIND:PROCESS:STEP in the environment, process PROCESS meets with it in step STEP: a
signal by its name, "error" for an exception, "setting" for another value of what must be the same.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from experiments import dapo_qwen
from isojax import distributed
from isojax.contract import contract, startup
from isojax.distributed import MismatchError
from isojax.rl.loop import Run
from isojax.trainer.interrupt import Interrupts

ROOT = Path(__file__).parents[1]


def accident(step: int) -> bool:
    """Whether it is another setting; the other kinds happen here."""
    kind, *where = os.environ.get("ACCIDENT", "none").split(":")
    if list(map(int, where)) != [distributed.index(), step]:
        return False
    if kind == "error":
        raise OSError("no space left on device")
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    return kind == "setting"


def samples(groups, scored):
    """Arrays of what a step sampled and scored, end to end."""
    completions = [completion for group in groups for completion in group.completions]
    return {
        "tokens": np.concatenate([sample.token_ids for sample in completions]),
        "logprobs": np.concatenate([sample.logprobs for sample in completions]),
        "thresholds": np.concatenate([sample.thresholds for sample in completions]),
        "scores": np.concatenate([own.full for own in scored]),
    }


def record(folder: Path) -> None:
    """Let every `Run` write STEP-PROCESS.npz into a folder."""
    agreement = Run._agreement

    def recorded(self, groups, scored):
        step = self.position.step
        np.savez(folder / f"{step}-{distributed.index()}.npz", **samples(groups, scored))
        accident(step)
        return agreement(self, groups, scored)

    Run._agreement = recorded


def without_contract() -> None:
    """Skip lowering every case: a committed contract stands in for the run's own."""
    startup.of_run = lambda *_, **__: contract.load(ROOT / "configs" / "tiny.contract.json")


def loop(options: list[str]) -> int:
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    own = parser.parse_args(options)
    distributed.join(own.cluster, own.coordinator, own.processes, own.process, own.lost_after)
    distributed.advise("HINT")
    me, steps = distributed.index(), 0
    assert distributed.share(lambda: [me, 0.1]) == [0, 0.1]
    try:
        with Interrupts() as interrupts:
            for step in range(200):
                interrupts.point()
                steps = step
                odd = accident(step)
                assert distributed.exchange(f"{me}") == [f"{i}" for i in range(own.processes)]
                if step % 10 == 0:
                    lines = f"seed = {int(odd)}\nsteps = 3"
                    distributed.check_same("settings", lines)
                    distributed.check_same("arrays", np.arange(3), b"x")
                time.sleep(0.05)
    except KeyboardInterrupt:
        together = distributed.arrive()
        print(f"stopped together={together} after step {steps}")
        return distributed.leave(130)
    except (MismatchError, OSError) as error:
        return distributed.fail(str(error), 3)
    return distributed.leave(0)


def main(kind: str, options: list[str]) -> int:
    if kind == "loop":
        return loop(options)
    record(Path(os.environ["RECORD"]))
    if os.environ.get("CONTRACT") == "committed":
        without_contract()
    return dapo_qwen.main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
