"""Time the attention kernels beside cuDNN and beside the floors of their FLOPs and bytes, on one
GPU.

    python experiments/bench_attention.py [--only forward,backward,decode,write] [--json FILE]

Prints a line per measurement as it is made. A time is the median over repeats of a queue of calls
divided by their number, so launch overhead that the GPU hides is hidden here too. Ceilings (copy
bandwidth, bf16 product) are measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import isojax  # noqa: F401  (sets XLA flags)
from pallas_kernels import attention

# query heads, KV heads, head dimension
CONFIGURATIONS = {"16/2x256": (16, 2, 256), "32/8x128": (32, 8, 128)}


def measure(run: Callable[[], object], *, budget: float = 0.15, repeats: int = 5) -> float:
    """Milliseconds of one call."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    calls = int(np.clip(budget / repeats / (time.perf_counter() - began), 2, 200))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / calls * 1e3)
    return statistics.median(times)


class Report:
    """Measurements with their floors, printed as they come."""

    def __init__(self):
        self.rows = []
        x = jnp.zeros((1 << 29,), jnp.float32)
        add = jax.jit(lambda x: x + 1)
        self.copy = 2 * x.nbytes / (measure(lambda: add(x)) * 1e-3)
        a = draw(0, 8192, 8192)
        dot = jax.jit(jnp.dot)
        self.product = 2 * 8192**3 / (measure(lambda: dot(a, a)) * 1e-3)
        print(
            f"{jax.devices()[0].device_kind}: copy {self.copy / 1e12:.2f} TB/s, bf16 product "
            f"{self.product / 1e12:.0f} TFLOP/s",
            flush=True,
        )

    def add(self, name, run, *, flops=0.0, size=0.0, peer=None) -> float | None:
        """Measure and print; `peer` is the other's time in ms. Returns ms, None if it failed."""
        try:
            ms = measure(run)
        except Exception as error:  # one variant must not end the run
            print(f"{name:48s} FAILED {str(error)[:300]}", flush=True)
            return None
        floor = max(flops / self.product, size / self.copy) * 1e3
        row = {"name": name, "ms": ms, "floor_ms": floor}
        line = f"{name:48s} {ms:8.4f} ms  floor {floor:7.4f} ({floor / ms:4.0%})"
        if peer is not None:
            row["peer_ms"] = peer
            line += f"  {peer / ms:5.2f}x of cuDNN"
        self.rows.append(row)
        print(line, flush=True)
        return ms


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def cudnn(batch, length, heads, kv_heads, dim):
    """(function, arguments) of the forward, and of the forward with its gradient."""
    q, k, v, dout = (
        draw(i, batch, length, h, dim) for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    )

    def forward(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def both(q, k, v, dout):
        out, vjp = jax.vjp(forward, q, k, v)
        return out, vjp(dout)

    return (jax.jit(forward), (q, k, v)), (jax.jit(both), (q, k, v, dout))


def training(batch, length, heads, kv_heads, dim, *, block=64, segment=4096):
    """The same of our kernels over whole sequences whose pages are written, and the work lists."""
    tokens, columns = batch * length, -(-length // 64)
    q, k, v, dout = (
        draw(i, tokens, h, dim) for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    )
    table = np.random.default_rng(0).permutation(batch * columns).reshape(batch, columns)
    table = jnp.asarray(table, jnp.int32)
    place = lambda x: (  # noqa: E731
        jnp.zeros((batch * columns, 64, kv_heads, dim), x.dtype)
        .at[table.reshape(-1)]
        .set(x.reshape(-1, 64, kv_heads, dim))
    )
    start = jnp.arange(batch, dtype=jnp.int32) * length
    size = jnp.full((batch,), length, jnp.int32)
    blocking = attention.blocking_of(heads, kv_heads, block, segment)
    scale = dim**-0.5

    @jax.jit
    def plan(start, size):
        forward = attention.plan_attention(
            start, size, 0 * start, tokens=tokens, max_keys=columns * 64, decode=False,
            blocking=blocking,
        )  # fmt: skip
        return forward, attention.plan_attention_backward(start, size, tokens=tokens)

    def forward(q, k_pages, v_pages, work, lse=False):
        return attention.paged_attention(
            q, k_pages, v_pages, table, start, work, scale=scale, blocking=blocking, tiles=True,
            decode=False, lse=lse,
        )  # fmt: skip

    def both(q, k, v, dout, k_pages, v_pages, work, backward_work):
        out, lse = forward(q, k_pages, v_pages, work, lse=True)
        return out, attention.paged_attention_backward(
            q, k, v, out, lse, dout, backward_work, scale=scale, max_length=length,
            chain=heads // 8,
        )  # fmt: skip

    pages, (work, backward_work) = (place(k), place(v)), plan(start, size)
    return (
        (jax.jit(forward), (q, *pages, work)),
        (jax.jit(both), (q, k, v, dout, *pages, work, backward_work)),
        (plan, (start, size)),
    )


def decoding(sequences, context, heads, kv_heads, dim, *, block=64, segment=4096):
    """One new token of each sequence after `context` - 1 cached ones."""
    columns = -(-context // 64)
    q = draw(0, sequences, heads, dim)
    pages = [draw(i, sequences * columns, 64, kv_heads, dim) for i in (1, 2)]
    table = np.random.default_rng(0).permutation(sequences * columns).reshape(sequences, columns)
    table, start = jnp.asarray(table, jnp.int32), jnp.arange(sequences, dtype=jnp.int32)
    blocking = attention.blocking_of(heads, kv_heads, block, segment)
    work = attention.plan_attention(
        start, jnp.ones_like(start), jnp.full_like(start, context - 1), tokens=sequences,
        max_keys=columns * 64, decode=True, blocking=blocking,
    )  # fmt: skip

    @jax.jit
    def run(q, k_pages, v_pages, table, start, work):
        return attention.paged_attention(
            q, k_pages, v_pages, table, start, work, scale=dim**-0.5, blocking=blocking,
            tiles=False, decode=True,
        )[0]  # fmt: skip

    return run, (q, *pages, table, start, work)


def compiled(*calls):
    """Compile (function, arguments) pairs side by side, to callables without arguments."""

    def one(call):
        function, arguments = call
        try:
            ready = function.lower(*arguments).compile()
        except Exception as caught:
            error = caught

            def fail():
                raise RuntimeError(f"does not compile: {error}")

            return fail
        return lambda: ready(*arguments)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, calls))


def bench_training(report: Report, only: set[str]) -> None:
    for name, (heads, kv_heads, dim) in CONFIGURATIONS.items():
        for batch, length in ((1, 10240), (5, 2048)):
            shape, label = (batch, length, heads, kv_heads, dim), f"{name} {batch}x{length}"
            best = 128 if dim <= 128 else 64
            options = [(best, 4096)]
            if length > 4096:
                options += [(best, 8192), (best, 1 << 20)]  # the price of folding
            if best != 64:
                options.append((64, 4096))
            variants = [training(*shape, block=b, segment=s) for b, s in options]
            base, gradient, plan, *forwards = compiled(
                *cudnn(*shape), variants[0][2], *(v[0] for v in variants)
            )
            [ours] = compiled(variants[0][1])
            flops = 4 * batch * length * (length + 1) / 2 * heads * dim
            if "forward" in only:
                peer = report.add(f"cuDNN forward {label}", base, flops=flops)
                for (b, s), run in zip(options, forwards, strict=True):
                    title = f"forward {label} block {b} segment {s}"
                    report.add(title, run, flops=flops, peer=peer)
                report.add(f"plan {label}", plan)
            if "backward" in only:
                flops *= 3.5
                peer = report.add(f"cuDNN forward+backward {label}", gradient, flops=flops)
                report.add(f"forward+backward {label}", ours, flops=flops, peer=peer)


def bench_decode(report: Report) -> None:
    for name, (heads, kv_heads, dim) in CONFIGURATIONS.items():
        for sequences, context in ((256, 2048), (256, 8192), (1, 131072), (16, 512)):
            for segment in (4096, 2048) if context > 4096 else (4096,):
                call = decoding(sequences, context, heads, kv_heads, dim, segment=segment)
                title = f"decode {name} {sequences}x{context} segment {segment}"
                size = 4 * sequences * context * kv_heads * dim
                report.add(title, *compiled(call), size=size)


def bench_write(report: Report) -> None:
    for name, (_, kv_heads, dim) in CONFIGURATIONS.items():
        for label, tokens, rows in (("10240 rows", 10240, 64), ("256 single rows", 256, 1)):
            k, v = (draw(i, tokens, kv_heads, dim) for i in range(2))
            index = jnp.arange(tokens // rows, dtype=jnp.int32)
            pieces = (index[::-1, None], index, index * rows, 0 * index, 0 * index + rows)
            write = jax.jit(
                lambda *args, rows=rows: attention.write_pages(*args, piece_rows=rows),
                donate_argnums=(2, 3),
            )
            pools = [jnp.zeros((tokens // rows, 64, kv_heads, dim), k.dtype) for _ in range(2)]

            def run(write=write, k=k, v=v, pools=pools, pieces=pieces):
                pools[:] = write(k, v, *pools, *pieces)
                return pools

            report.add(f"write {name} {label}", run, size=4 * k.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="forward,backward,decode,write")
    parser.add_argument("--json", help="write the measurements there")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    report = Report()
    if only & {"forward", "backward"}:
        bench_training(report, only)
    if "decode" in only:
        bench_decode(report)
    if "write" in only:
        bench_write(report)
    if arguments.json:
        with open(arguments.json, "w") as file:
            ceilings = {"copy_bytes_per_s": report.copy, "product_flops": report.product}
            json.dump(ceilings | {"rows": report.rows}, file, indent=1)


if __name__ == "__main__":
    main()
