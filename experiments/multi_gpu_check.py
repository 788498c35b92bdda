"""On several GPUs: the same bits on every mesh, what that costs, and the main job at full size.

    python experiments/multi_gpu_check.py --json result.json
    python experiments/multi_gpu_check.py --rehearse     # eight virtual CPU devices, a tiny model

Two parts, within --seconds:

meshes  three DAPO steps (rollouts, scores, gradients, weights) of a hybrid mixture of experts with
        real head and expert shapes on every mesh that the devices allow; hashes of everything are
        compared with the 1x1 mesh's. Each mesh has a process of its own. All compile side by side
        in the first step; then each runs the others alone, by turns, which is where times are
        taken. Beside them, where all devices are on one axis, the same with plain collectives:
        `psum` for every leaf tree over ranks, one leaf a rank. The difference is the cost.
full    three steps of experiments/dapo_qwen.py with Qwen3.5-35B-A3B from random weights, if there
        are eight devices: times of generation, scoring and training, and memory.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "multi_gpu_check.toml"
FULL = ROOT / "configs" / "qwen3_5_35b_a3b.toml"
STEPS = 3
ONE_TURN = 8.0  # seconds that steps 2 and 3 of one mesh take, generously

# what a CPU can do: the same blocks, eight ways divisible, with the reference ops
REHEARSED: dict[str, Any] = {
    "policy.evaluation": "reference",
    "policy.chunk": 32,
    "policy.kv_block": 32,
    "model.vocab_size": 512,
    "model.hidden_size": 64,
    "model.num_attention_heads": 8,
    "model.head_dim": 16,
    "model.rotary_dim": 8,
    "model.num_experts": 8,
    "model.num_experts_per_tok": 4,
    "model.moe_intermediate_size": 16,
    "model.shared_expert_intermediate_size": 16,
    "model.linear_num_key_heads": 8,
    "model.linear_num_value_heads": 8,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16,
    "sampler.max_tokens": 32,
    "sampler.max_sequences": 8,
    "sampler.max_batch_tokens": 128,
    "trainer.microbatch_tokens": 96,
    "algorithm.samples_per_prompt": 4,
}


def meshes(devices: int) -> list[str]:
    """1x1 first, then every way to use some of the devices, options of the layout included."""
    found = ["1x1"]
    size = 2
    while size <= devices:
        model = 1
        while model <= size:
            found.append(f"{size // model}x{model}")
            model *= 2
        found += [f"1x{size}+sequence", f"{size // 2}x1+context2"]
        size *= 2
    return found


def checksum(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """A reward that varies between samples of an untrained model."""
    return float(sum(response.encode()) % 5)


def write_prompts(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i in range(64):
            line = {"prompt": f"What is {7 * i} + {i * i % 31}?", "answer": str(7 * i + i * i % 31)}
            file.write(json.dumps(line) + "\n")


# --- one mesh, in a process of its own ---


def digest(tree: Any) -> str:
    """SHA-256 of every array's bits, in order of the tree."""
    import jax
    import numpy as np

    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        total.update(f"{array.shape} {array.dtype}".encode())
        total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()[:16]


def plain_collectives() -> None:
    """Put XLA's reductions where leaf trees join ranks. The results then depend on the mesh."""
    from jax import lax

    from isojax.mesh import MODEL, ROWS
    from isojax.ops import linear, logprob
    from isojax.trainer import gradients

    def model_sum(partial: Any, layout: Any, dtype: Any) -> Any:
        if layout.model == 1:
            return partial.astype(dtype)
        if layout.sequence_parallel:
            return lax.psum_scatter(partial.astype(dtype), MODEL, tiled=True)
        return lax.psum(partial.astype(dtype), MODEL)

    def reduce_gradient(partial: Any, *, placement: Any, layout: Any) -> Any:
        if placement.owned or layout.row_ranks == 1:
            return partial
        if placement.axis is None:
            return lax.psum(partial, ROWS)
        return lax.psum_scatter(partial, ROWS, scatter_dimension=placement.axis, tiled=True)

    linear.model_sum = logprob.model_sum = model_sum
    gradients.reduce_gradient = reduce_gradient


def work(mesh: str, name: str, folder: Path, rehearse: bool, plain: bool) -> None:
    """Train on `mesh`; print one JSON line: hashes of every step, and the run's own metrics."""
    import jax

    from isojax import config_io
    from isojax.contract import startup
    from isojax.contract.contract import SECTIONS, Contract
    from isojax.mesh import Layout
    from isojax.rl.loop import Run

    # bits are compared here, not programs, and lowering these takes a minute a mesh
    blank: dict[str, Any] = dict.fromkeys(SECTIONS, {}) | {"evidence": []}
    startup.of_run = lambda config, **_: Contract(blank)  # type: ignore[assignment]

    layout = Layout.parse(mesh)
    changes = dict(REHEARSED) if rehearse else {}
    changes |= {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "steps": STEPS,
        "data.path": str(folder / "prompts.jsonl"),
        "data.reward": "experiments.multi_gpu_check:checksum",
        "mesh.data": layout.data,
        "mesh.model": layout.model,
        "mesh.context": layout.context,
        "mesh.sequence_parallel": layout.sequence_parallel,
    }
    config = config_io.load(CONFIG, changes)
    if plain:
        plain_collectives()
        policy = dataclasses.replace(
            config.policy, leaves=layout.model, vocab_leaves=layout.model,
            batch_leaves=layout.data, context_leaves=layout.context,
        )  # fmt: skip
        config = dataclasses.replace(
            config,
            policy=policy,
            contract=dataclasses.replace(config.contract, on_difference="warn"),
        )

    class Watched(Run):
        """A run that takes the hash of what it samples, scores and learns."""

        def _train(self, minibatches: Sequence[Sequence[Any]], schedule: Any) -> list[Any]:
            sampled = [
                [(e.tokens, e.old_logp, e.threshold) for e in batch] for batch in minibatches
            ]
            results = super()._train(minibatches, schedule)
            norms = [float(r.grad_norm).hex() for r in results]
            hashes.append({"samples, log-probabilities": digest(sampled), "gradient norm": norms})
            return results

        def _step(self, *args: Any) -> None:
            if self.position.step == 1:
                print("READY", flush=True)
                sys.stdin.readline()
            super()._step(*args)

        def _save(self) -> None:
            """Nobody goes on with this run."""

    hashes: list[dict[str, Any]] = []
    run = Watched(config)
    run.run()
    # the moments hold the gradients of all steps
    hashes.append({"weights": digest(run.state.master), "moments": digest(run.state.optimizer)})
    memory = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()]
    lines = (run.config.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    kept = ("logp_diff_max", "time_generate_s", "time_score_s", "time_train_s", "tokens_generated")
    metrics = [{name: step[name] for name in kept} for step in steps]
    result = {"mesh": mesh, "hashes": hashes, "metrics": metrics, "peak_bytes": max(memory)}
    print("RESULT " + json.dumps(result), flush=True)


# --- all of them ---


def gpus() -> int:
    """Devices that jax sees, asked in another process, so that this one holds none of them."""
    asked = "import jax; print(len(jax.devices()))"
    return int(subprocess.check_output([sys.executable, "-c", asked], text=True).split()[-1])


class Clock:
    """How much of the time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


class Job:
    """A command of this repository in a process of its own, which writes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, rehearse: bool) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]]))
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        environment.setdefault("JAX_LOG_COMPILES", "1")  # the log then says where time went
        if rehearse:
            environment["JAX_PLATFORMS"] = "cpu"
            flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}"
        self._log = log
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment,
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def ready(self) -> bool:
        """Whether it waits for its turn."""
        return "READY" in self._said().splitlines()

    def go(self) -> None:
        """Give it its turn."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def result(self) -> dict[str, Any]:
        """End it -> the RESULT that it printed, or {"failed": why, "log": end}."""
        why = f"exit status {self._process.returncode}" if self.ended else "ended"
        self._process.kill()
        self._process.wait()
        lines = self._said().splitlines()
        for line in lines:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
        errors = [line for line in lines if "Error" in line or "ERROR" in line]
        why += f": {(errors or ['no error in the log'])[0][:300]}"
        return {"failed": why, "log": "\n".join(lines)[-4000:]}

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def wait(clock: Clock, done: Callable[[], bool], keep: float = 0.0) -> None:
    """Until `done()`, or until only `keep` seconds are left."""
    while not done() and clock.left() > keep:
        time.sleep(0.5)


def by_turns(jobs: Mapping[str, Job], clock: Clock) -> dict[str, dict[str, Any]]:
    """Let all get ready side by side, then each go on alone -> their results."""
    wait(clock, lambda: all(j.ready or j.ended for j in jobs.values()), ONE_TURN * len(jobs))
    results = {name: job.result() for name, job in jobs.items() if job.ended or not job.ready}
    for name, job in jobs.items():
        if name not in results:
            job.go()
            wait(clock, lambda job=job: job.ended)
            results[name] = job.result()
    return {name: results[name] for name in jobs}


def differences(result: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """What differs from the 1x1 mesh, as "step N: what"."""
    return [
        f"step {number}: {what}"
        for number, (a, b) in enumerate(zip(result["hashes"], alone["hashes"], strict=True), 1)
        for what in a
        if a[what] != b[what]
    ]


def seconds_a_step(result: dict[str, Any]) -> dict[str, float]:
    """Means over the steps after the first, which compiles."""
    steps = result["metrics"][1:]
    parts = ("generate", "score", "train")
    return {p: round(sum(s[f"time_{p}_s"] for s in steps) / len(steps), 3) for p in parts}


HEAD = (
    f"{'mesh':20} {'as 1x1':>7} {'logp_diff_max':>14} {'peak GiB':>9} {'generate':>9} {'score':>9} "
    f"{'train':>9}   seconds a step"
)


def line_of(r: dict[str, Any]) -> str:
    """A line under `HEAD`, and what differs below it."""
    if "failed" in r:
        return f"failed: {r['failed']}"
    worst = max(step["logp_diff_max"] for step in r["metrics"])
    same = ""  # of a run with plain collectives nothing is asked
    if "differences" in r:
        same = "NO" if r["differences"] else "yes"
    times = " ".join(f"{seconds:9}" for seconds in seconds_a_step(r).values())
    line = f"{same:>7} {worst:14} {r['peak_bytes'] / 2**30:9.1f} {times}"
    return "\n    ".join([line, *r.get("differences", [])[:6]])


def all_meshes(
    wanted: Sequence[str], devices: int, folder: Path, clock: Clock, rehearse: bool
) -> dict[str, dict[str, Any]]:
    """The part "meshes": results by mesh, and by "MESH plain"."""

    def job(mesh: str, name: str, *more: str) -> Job:
        command = [__file__, "--work", mesh, "--name", name, "--folder", str(folder), *more]
        return Job(command + ["--rehearse"] * rehearse, folder / f"{name}.log", rehearse)

    jobs = {mesh: job(mesh, mesh) for mesh in wanted}
    for mesh in (m for m in (f"{devices}x1", f"1x{devices}") if m in wanted):
        jobs[f"{mesh} plain"] = job(mesh, f"{mesh}-plain", "--plain")
    results = by_turns(jobs, clock)
    alone = results[wanted[0]]
    for mesh in wanted:
        if "failed" not in results[mesh]:
            results[mesh]["differences"] = (
                ["nothing to compare"] if "failed" in alone else differences(results[mesh], alone)
            )
    return results


def full_size(folder: Path, clock: Clock) -> dict[str, Any]:
    """Three steps of the main job with the 35B model; the metrics of each."""
    arguments = [
        "--config", str(FULL), "--runs-dir", str(folder / "runs"), "--name", "full",
        "--steps", str(STEPS), "--data.source", "jsonl",
        "--data.path", str(folder / "prompts.jsonl"),
        "--data.reward", "experiments.multi_gpu_check:checksum",
        "--data.max-prompt-tokens", "128", "--sampler.max-tokens", "896",
        "--sampler.bucket-sizes", "1", "--trainer.microbatch-tokens", "2048",
        "--algorithm.prompts-per-step", "8", "--trainer.minibatch-prompts", "8",
        "--algorithm.samples-per-prompt", "16", "--algorithm.overlong-buffer", "0",
        "--algorithm.dynamic-sampling", "false", "--trainer.checkpoint-every", "0",
        "--report.tensorboard", "false",
    ]  # fmt: skip
    file = folder / "runs" / "full" / "metrics.jsonl"

    def steps() -> list[dict[str, Any]]:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    # its last checkpoint, 12 bytes a parameter, would take the rest of the time
    def done() -> bool:
        return len(steps()) == STEPS

    job = str(ROOT / "experiments" / "dapo_qwen.py")
    run = Job([job, *arguments], folder / "full.log", rehearse=False)
    wait(clock, lambda: done() or run.ended)
    complete, ended = done(), run.result()
    return {"metrics": steps()} | ({} if complete else ended)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on virtual CPU devices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--meshes", nargs="+", help="instead of all that the devices allow")
    parser.add_argument("--parts", nargs="+", default=["meshes", "full"])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.name, args.folder, args.rehearse, args.plain)
        return 0

    clock = Clock(args.seconds)
    devices = 8 if args.rehearse else gpus()
    wanted = args.meshes or meshes(devices)
    result: dict[str, Any] = {"devices": devices, "rehearsal": args.rehearse}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_prompts(folder / "prompts.jsonl")
        if "meshes" in args.parts:
            result["meshes"] = all_meshes(wanted, devices, folder, clock, args.rehearse)
            print(HEAD)
            for name, r in result["meshes"].items():
                print(f"{name:20}", line_of(r), flush=True)
        if "full" in args.parts and devices >= 8 and not args.rehearse:
            result["full"] = full_size(folder, clock)
            print(json.dumps(result["full"], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return int(
        any(r.get("differences") or "failed" in r for r in result.get("meshes", {}).values())
    )


if __name__ == "__main__":
    sys.exit(main())
