"""Time whole calls of a model with random weights on one GPU: decode, prefill, score, gradient.

    python experiments/bench_model.py decode agreement score --json result.json
    python experiments/bench_model.py gradient --layers 8

decode    the engine serves requests of 512 prompt tokens: the time of its calls as its caller sees
          it, and what the device's kernels take of it.
agreement the log-probabilities of what the engine sampled, bit by bit against the trainer's.
score     the trainer's log-probabilities of sequences of 2048 tokens, 8 in a call.
gradient  one call of forward and backward of the same size. Its sums take 8 bytes a parameter, so
          Qwen3.5-35B-A3B fits one GPU with few of its layers only.

The floor of a decode call is the time to read every weight once, at the bandwidth of a copy.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_gdn import device_times
from jax.sharding import NamedSharding

from isojax import config_io
from isojax.config import RunConfig, resolve_model
from isojax.models.params import Parameter, parameters
from isojax.sampler.engine import Engine
from isojax.sampler.executor import Executor
from isojax.sampler.request import Completion, Request
from isojax.sampler.settings import engine_config, executor
from isojax.trainer import settings
from isojax.trainer.call import put
from isojax.trainer.packing import Example, pack
from isojax.trainer.score import Scorer, compare

ROOT = Path(__file__).parents[1]
COPY = 4.3e12  # bytes a second, read and written, of a copy on an H200
PROMPT, RESPONSE, LENGTH = 512, 64, 2048


def configured(path: Path, layers: int | None, sequences: int) -> RunConfig:
    """The settings of `path` for one GPU and the sizes measured here."""
    changes: dict[str, Any] = {
        "mesh.data": 1,
        "mesh.model": 1,
        "sampler.max_sequences": sequences,
        "sampler.max_tokens": LENGTH - PROMPT,
        "sampler.pages": sequences * (PROMPT + RESPONSE + 127) // 64,
        "data.max_prompt_tokens": PROMPT,
        "trainer.microbatch_tokens": LENGTH,
        "algorithm.overlong_buffer": 0,
    }
    if layers:
        changes["model.num_layers"] = layers
    return config_io.load(path, changes)


def random_weights(config: RunConfig, mesh: Any) -> Any:
    """Weights drawn on the device, of the right scale: quick to make, no run's."""

    def draw(number: int, p: Parameter) -> jax.Array:
        def values() -> jax.Array:
            if p.init != "normal":
                return jnp.full(p.shape, {"ones": 1.0, "dt_bias": -4.0}.get(p.init, 0.0), p.dtype)
            key = jax.random.key(number, impl="unsafe_rbg")
            return p.std * jax.random.normal(key, p.shape, p.dtype)

        return jax.jit(values, out_shardings=NamedSharding(mesh, p.spec))()

    described, tree = jax.tree.flatten(
        parameters(resolve_model(config), config.policy, config.mesh)
    )
    return jax.tree.unflatten(tree, [draw(i, p) for i, p in enumerate(described)])


class Bench:
    """A configuration with weights, and the programs that several parts use."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.model = config, resolve_model(config)
        self.mesh = config.mesh.mesh()
        self.params = random_weights(config, self.mesh)

    @functools.cached_property
    def executor(self) -> Executor:
        return executor(self.config, self.model, self.mesh, self.params)

    @functools.cached_property
    def scorer(self) -> Scorer:
        return settings.scorer(self.config, self.model, self.mesh)


def weight_bytes(params: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def median_ms(call: Callable[[], Any], repetitions: int = 5) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def top(kernels: dict[str, float], count: int = 14) -> dict[str, float]:
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:count]
    return {name[:60]: round(ms, 4) for name, ms in largest}


class Watched:
    """An executor that notes when its calls begin, and traces `traced` of the decoding ones."""

    def __init__(self, inner: Any, traced: int) -> None:
        self._inner, self._traced = inner, traced
        self.began: list[tuple[Any, float]] = []
        self.kernels: dict[str, float] = {}
        self.device_ms = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, bucket: Any, ranks: Any, after: Any = None) -> Any:
        self.began.append((bucket, time.perf_counter()))
        if bucket.piece_rows == 1 and self._traced and len(self.began) > RESPONSE // 2:
            repetitions, self._traced = self._traced, 0
            # the same call again and again: positions stay, so its result is that of one
            again = lambda: self._inner.step(bucket, ranks, after).wait()  # noqa: E731
            self.device_ms, self.kernels = device_times(again, repetitions)
        return self._inner.step(bucket, ranks, after)

    def spans(self) -> dict[Any, list[float]]:
        """Milliseconds from the beginning of a call to that of the next, by bucket."""
        found: dict[Any, list[float]] = {}
        for (bucket, start), (_, end) in zip(self.began, self.began[1:], strict=False):
            found.setdefault(bucket, []).append((end - start) * 1e3)
        return found


def serve(b: Bench, inner: Any, count: int) -> list[tuple[list[int], Completion]]:
    """(prompt, what was sampled) of `count` requests."""
    engine = Engine(
        inner, engine_config(b.config), vocab_size=b.model.vocab_size, chunk=b.config.policy.chunk
    )
    random = np.random.default_rng(0)
    prompts = random.integers(1, b.model.vocab_size, (count, PROMPT)).tolist()
    done = engine.generate([Request(p, RESPONSE, seed=i) for i, p in enumerate(prompts)])
    return [(p, samples[0]) for p, samples in zip(prompts, done, strict=True)]


def bench_decode(b: Bench) -> dict[str, Any]:
    """Calls of the engine with as many sequences as it holds, and with a quarter of them."""
    floor = weight_bytes(b.params) / COPY * 1e3
    result: dict[str, Any] = {"weights read once, ms": round(floor, 2)}
    most = b.config.sampler.max_sequences
    for count in (most, most // 4):
        alone, seen = Watched(b.executor, traced=0), Watched(b.executor, traced=3)
        for inner in (b.executor, alone, seen):  # the first compiles
            serve(b, inner, count)
        for bucket, spans in alone.spans().items():
            kind = "decode" if bucket.piece_rows == 1 else "mixed"
            name = f"{count} sequences, {kind} call of {bucket.tokens} tokens"
            result[name] = {
                "calls": len(spans),
                "ms": round(statistics.median(spans), 3),
                **({"device_ms": round(seen.device_ms, 3)} if kind == "decode" else {}),
            }
        result[f"{count} sequences, kernels"] = top(seen.kernels, 30)
    b.executor.release()
    return result


def bench_agreement(b: Bench) -> dict[str, Any]:
    """Sample with the engine, score with the trainer, compare."""
    done = serve(b, b.executor, b.config.sampler.max_sequences)
    b.executor.release()
    asked = [Example(np.concatenate([p, c.token_ids]).astype(np.int32), PROMPT) for p, c in done]
    # full calls alone: the rest would compile a program of its own
    whole = b.config.policy.row_leaves * (LENGTH // (PROMPT + RESPONSE))
    asked = asked[: len(asked) // whole * whole or None]
    done = done[: len(asked)]
    scored = b.scorer(b.params, asked)
    found = compare([c.logprobs for _, c in done], [own.full for own in scored], cap=2.0)
    return dataclasses.asdict(found)


def examples(vocab: int) -> list[Example]:
    random = np.random.default_rng(1)
    draw = lambda: random.integers(1, vocab, LENGTH)  # noqa: E731
    return [
        Example(draw(), PROMPT, old_logp=np.full(LENGTH - PROMPT, -12.0, np.float32), advantage=0.5)
        for _ in range(8)
    ]


def call_of(b: Bench) -> Any:
    (batch,), _ = pack(
        examples(b.model.vocab_size),
        b.config.trainer.microbatch_tokens,
        b.config.policy,
        b.config.mesh,
        longest=b.config.max_length,
    )
    return put(batch, b.mesh)


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    jax.block_until_ready(call())
    device_ms, kernels = device_times(lambda: jax.block_until_ready(call()), 3)
    return {
        "ms": round(median_ms(call), 2),
        "device_ms": round(device_ms, 2),
        "kernels": top(kernels, 40),
    }


def bench_score(b: Bench) -> dict[str, Any]:
    """8 sequences of 2048 tokens in one call."""
    batch = call_of(b)
    return timed(lambda: b.scorer.call(b.params, batch))


def bench_gradient(b: Bench) -> dict[str, Any]:
    """Forward and backward of 8 sequences of 2048 tokens, gradients added to float32 sums."""
    trainer, batch = settings.trainer(b.config, b.model, b.mesh), call_of(b)
    loss, totals = settings.policy_loss(b.config), trainer.zeros()

    def call() -> Any:
        nonlocal totals
        totals, rows = trainer.add(b.params, totals, batch, loss)
        return rows

    return timed(call)


PARTS = {
    "decode": bench_decode,
    "agreement": bench_agreement,
    "score": bench_score,
    "gradient": bench_gradient,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "qwen3_5_35b_a3b.toml")
    parser.add_argument("--layers", type=int, help="fewer layers than the configuration's")
    parser.add_argument("--sequences", type=int, default=256, help="that decode at a time")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    config = configured(options.config, options.layers, options.sequences)
    bench = Bench(config)
    print(f"{weight_bytes(bench.params) / 1e9:.1f} GB of weights", flush=True)
    results = {}
    for part in options.parts:
        results[part] = PARTS[part](bench)
        print(f"{part}: {json.dumps(results[part], indent=1)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
