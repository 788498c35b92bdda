"""Check and time the matrix kernels on a GPU, each beside its peer, and print one line a case.

    python experiments/bench_kernels.py matmul decode grouped logprob exact_matmul [--full]

Times are medians of CUPTI kernel times (sums over the kernels of one call). A call cycles through
several copies of the weights where they would otherwise stay in the L2 cache. `--full` tries a list
of tiles instead of the tuning table's; the `exact_*` parts check that tiles change no bit.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.grouped_matmul import aligned_starts, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul_dw import grouped_matmul_dw
from pallas_kernels.linear_logprob import combine_leaves, linear_logprob_stats, logits_stats
from pallas_kernels.linear_logprob_backward import linear_logprob_backward
from pallas_kernels.matmul import matmul
from pallas_kernels.tuning import MatmulTile, matmul_tile

BF16, F32 = jnp.bfloat16, jnp.float32
RESULTS: list[dict] = []


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    integer = jnp.int16 if a.dtype == BF16 else jnp.int32
    return bool(jnp.array_equal(a.view(integer), b.view(integer)))


def error(out: jax.Array, reference: jax.Array) -> float:
    out, reference = out.astype(F32), reference.astype(F32)
    return float(jnp.linalg.norm(out - reference) / jnp.linalg.norm(reference))


@contextlib.contextmanager
def exclusive():
    """Hold the GPU against other processes of this script, which may compile in the meantime."""
    with open(os.path.join(tempfile.gettempdir(), "bench_kernels.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_all(calls: Sequence[tuple[Callable, tuple]]) -> list:
    """Compile every (function, arguments) on many threads; a failure is returned in its place."""

    def build(call):
        function, arguments = call
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as failure:
            return failure

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(build, calls))


def time_ms(compiled, arguments, iterations: int, share: int = 1) -> tuple[float, jax.Array]:
    out, times = profiler.measure(compiled, iterations=iterations)(*arguments)
    times = times if isinstance(times, list) else [times]
    return statistics.median(times) / share, out


def report(case: str, name: str, **values) -> None:
    RESULTS.append({"case": case, "name": name, **values})
    text = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )
    print(f"{case:34s} {name:22s} {text}", flush=True)


def compare(
    case, functions, arguments, *, flops=0.0, nbytes=0.0, iterations=8, share=1, first=None
):
    """Time `functions` (the first is the peer) on the same arguments, and compare their results."""
    compiled = compile_all([(function, arguments) for function in functions.values()])
    reference = peer = None
    for name, function in zip(functions, compiled, strict=True):
        if isinstance(function, Exception):
            report(case, name, failed=f"{type(function).__name__}: {str(function)[:200]}")
            continue
        try:
            with exclusive():
                ms, out = time_ms(function, arguments, iterations, share)
        except Exception as failure:
            report(case, name, failed=f"{type(failure).__name__}: {str(failure)[:200]}")
            continue
        out = jax.tree.leaves(out)[0] if first is None else first(out)
        values = {"ms": ms}
        if flops:
            values["tflops"] = flops / ms / 1e9
        if nbytes:
            values["tb_s"] = nbytes / ms / 1e9
        if reference is None:
            reference, peer = out, ms
        else:
            values |= {"speed": peer / ms, "error": error(out, reference)}
        report(case, name, **values)


TILES = {
    "64x256": MatmulTile(rows=64, cols=256),
    "64x256 band4": MatmulTile(rows=64, cols=256, band=4),
    "64x256 rows band8": MatmulTile(rows=64, cols=256, minor=0),
    "64x256 rows band16": MatmulTile(rows=64, cols=256, minor=0, band=16),
    "128x128": MatmulTile(rows=128, cols=128),
    "128x128 rows band8": MatmulTile(rows=128, cols=128, minor=0),
    "64x128": MatmulTile(rows=64, cols=128, stages=6),
    "64x192": MatmulTile(rows=64, cols=192),
    "swap 64x256": MatmulTile(rows=64, cols=256, swap=True),
}
LEAF_TILES = {
    "64x128 hold8": MatmulTile(rows=64, cols=128),
    "64x128 hold8 rows": MatmulTile(rows=64, cols=128, minor=0),
    "64x128 hold4": MatmulTile(rows=64, cols=128, hold_from=4),
    "64x128 regs": MatmulTile(rows=64, cols=128, hold_from=16),
    "64x128 stages3": MatmulTile(rows=64, cols=128, stages=3),
}


def small_tiles(m: int) -> dict[str, MatmulTile]:
    cols = m + -m % 8
    tiles = {}
    if cols <= 256:
        for groups, stages in ((1, 8), (2, 6), (1, 4)):
            tiles[f"swap 64x{cols} wg{groups} s{stages}"] = MatmulTile(
                rows=64, cols=cols, warpgroups=groups, stages=stages, swap=True
            )
    if cols > 64:
        tiles["swap 64x64 wg2"] = MatmulTile(rows=64, cols=64, warpgroups=2, stages=6, swap=True)
        tiles["swap 64x128 wg2"] = MatmulTile(rows=64, cols=128, warpgroups=2, stages=5, swap=True)
        tiles["swap 64x128 wg1"] = MatmulTile(rows=64, cols=128, warpgroups=1, stages=6, swap=True)
        tiles["64x128 wg2"] = MatmulTile(rows=64, cols=128, stages=5)
        tiles["64x128 wg1"] = MatmulTile(rows=64, cols=128, warpgroups=1, stages=6)
        tiles["64x64 wg1"] = MatmulTile(rows=64, cols=64, warpgroups=1, stages=8)
    return tiles


def fitting(tiles, leaves):
    def fits(t):
        stage = (t.rows * t.warpgroups + t.cols) * 128 * t.stages
        hold = t.warpgroups * t.rows * t.cols * 4 if leaves >= t.hold_from else 0
        out = t.warpgroups * 2 * (t.cols * 256 if t.swap else 64 * 128)
        return stage + hold + out <= 226 * 1024

    return {name: t for name, t in tiles.items() if fits(t)}


def bench_matmul(full: bool) -> None:
    cases = [
        # M, K, N, leaves, transpose_a, transpose_b, out
        ("fwd 10240x12288x2048", 10240, 2048, 12288, 1, False, False, BF16),
        ("fwd 8192^3", 8192, 8192, 8192, 1, False, False, BF16),
        ("row 10240x2048x4096 G8", 10240, 4096, 2048, 8, False, False, BF16),
        ("dx 10240x2048x12288 G8 nt", 10240, 12288, 2048, 8, False, True, F32),
        ("dx 10240x4096x2048 nt", 10240, 2048, 4096, 1, False, True, BF16),
        ("dw 2048x12288 tn", 2048, 10240, 12288, 1, True, False, F32),
        ("dw 2048x12288 tn G8", 2048, 10240, 12288, 8, True, False, F32),
    ]
    for case, m, k, n, leaves, ta, tb, dtype in cases:
        a = normal(1, *((k, m) if ta else (m, k)))
        b = normal(2, *((n, k) if tb else (k, n)))

        def peer(a, b, ta=ta, tb=tb, dtype=dtype):
            dims = (((0 if ta else 1,), (1 if tb else 0,)), ((), ()))
            return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)

        tiles = fitting(LEAF_TILES if leaves > 1 else TILES, leaves)
        if not full:
            tiles = {"table": matmul_tile(m, k, n, leaves, dtype)}
        functions = {"xla dot": peer}
        for name, tile in tiles.items():
            functions[name] = lambda a, b, tile=tile, leaves=leaves, ta=ta, tb=tb, dtype=dtype: (
                matmul(
                    a, b, leaves=leaves, transpose_a=ta, transpose_b=tb, out_dtype=dtype, tile=tile
                )
            )
        compare(case, functions, (a, b), flops=2.0 * m * k * n, iterations=6)


def bench_decode(full: bool) -> None:
    for k, n, leaves in ((2048, 4096, 1), (4096, 2048, 8), (2048, 12288, 1), (2048, 512, 1)):
        copies = max(2, -(-160_000_000 // (k * n * 2)))
        w = [normal(i, k, n) for i in range(copies)]
        for m in (1, 16, 64, 256):
            x = normal(99, m, k)

            def peer(x, w):
                return [jnp.dot(x, b) for b in w]

            tiles = fitting(small_tiles(m), leaves)
            if not full:
                tiles = {"table": matmul_tile(m, k, n, leaves, BF16)}
            functions = {"xla dot": peer}
            for name, tile in tiles.items():
                functions[name] = lambda x, w, tile=tile, leaves=leaves: [
                    matmul(x, b, leaves=leaves, tile=tile) for b in w
                ]
            compare(
                f"decode {m}x{n}x{k} G{leaves}",
                functions,
                (x, w),
                nbytes=2.0 * k * n,
                iterations=3,
                share=copies,
            )


def expert_sizes(rows: int, groups: int, seed: int) -> jax.Array:
    """Rows of every group when every row picks a group at random."""
    picks = np.random.default_rng(seed).integers(0, groups, rows)
    return jnp.asarray(np.bincount(picks, minlength=groups), jnp.int32)


def bench_grouped(full: bool) -> None:
    groups, hidden, inner = 256, 2048, 512
    gate, up = normal(3, groups, hidden, inner), normal(4, groups, hidden, inner)
    down = normal(5, groups, inner, hidden)
    for rows, tiles in (
        (
            81920,
            {
                "64 wg2": (MatmulTile(64, 256), MatmulTile(64, 128)),
                "64 wg2 s3": (MatmulTile(64, 256, stages=3), MatmulTile(64, 128, stages=3)),
                "64 wg2 half": (MatmulTile(64, 128, stages=6), MatmulTile(64, 64, stages=5)),
                "128 wg1": (
                    MatmulTile(128, 128, warpgroups=1, stages=5),
                    MatmulTile(64, 128, warpgroups=1, stages=5),
                ),
                "swap 64x128": (
                    MatmulTile(64, 128, stages=5, swap=True),
                    MatmulTile(64, 128, stages=4, swap=True),
                ),
            },
        ),
        (
            2048,
            {
                "swap 64x32": (
                    MatmulTile(64, 32, stages=6, swap=True),
                    MatmulTile(64, 32, stages=5, swap=True),
                ),
                "swap 64x16": (
                    MatmulTile(64, 16, stages=6, swap=True),
                    MatmulTile(64, 16, stages=5, swap=True),
                ),
                "swap 64x16 wg1": (
                    MatmulTile(64, 16, warpgroups=1, stages=12, swap=True),
                    MatmulTile(64, 16, warpgroups=1, stages=10, swap=True),
                ),
            },
        ),
    ):
        sizes = expert_sizes(rows, groups, rows)
        starts = aligned_starts(sizes)
        capacity = rows + 8 * groups
        x, h = normal(6, capacity, hidden), normal(7, capacity, inner)
        # Rows between groups are not written, so the comparison drops them.
        owner = np.zeros(capacity, bool)
        for s, c in zip(np.asarray(starts), np.asarray(sizes), strict=True):
            owner[s : s + c] = True
        kept = jnp.asarray(owner)[:, None]

        def keep(out, kept=kept):
            return jnp.where(kept, out[0] if isinstance(out, (tuple, list)) else out, 0)

        (first_tile,) = list(tiles)[:1]
        functions = {
            name: lambda x, g, u, st, sz, t=t: grouped_swiglu(x, g, u, st, sz, tile=t[1])
            for name, t in tiles.items()
        }
        functions |= {
            first_tile + " save": lambda x, g, u, st, sz, t=tiles[first_tile]: grouped_swiglu(
                x, g, u, st, sz, tile=t[1], save=True
            )
        }
        compare(
            f"experts gate+up {rows}",
            functions,
            (x, gate, up, starts, sizes),
            flops=4.0 * rows * hidden * inner,
            nbytes=2.0 * (2 * gate.size + rows * (hidden + inner)),
            first=keep,
        )
        functions = {
            name: lambda h, d, st, sz, t=t: grouped_matmul(h, d, st, sz, tile=t[0])
            for name, t in tiles.items()
        }
        compare(
            f"experts down {rows}",
            functions,
            (h, down, starts, sizes),
            flops=2.0 * rows * hidden * inner,
            nbytes=2.0 * (down.size + rows * (hidden + inner)),
            first=keep,
        )
        if rows < 10000:
            continue
        h2 = normal(8, capacity, inner)
        compare(
            f"experts dx of gate+up {rows}",
            {
                name: lambda a, b, g, u, st, sz, t=t: grouped_matmul(
                    (a, b), (g, u), st, sz, transpose_w=True, tile=t[0]
                )
                for name, t in tiles.items()
            },
            (h, h2, gate, up, starts, sizes),
            flops=4.0 * rows * hidden * inner,
            first=keep,
        )
        compare(
            f"experts dx of down {rows}",
            {
                name: lambda a, d, st, sz, t=t: grouped_matmul(
                    a, d, st, sz, transpose_w=True, tile=t[0]
                )
                for name, t in tiles.items()
            },
            (x, down, starts, sizes),
            flops=2.0 * rows * hidden * inner,
            first=keep,
        )
        compare(
            f"experts dw {rows} 2048x512",
            {
                "64x256": lambda x, h, st, sz: grouped_matmul_dw(x, h, st, sz),
                "64x128": lambda x, h, st, sz: grouped_matmul_dw(
                    x, h, st, sz, tile=MatmulTile(64, 128, stages=6)
                ),
                "bf16 out": lambda x, h, st, sz: grouped_matmul_dw(x, h, st, sz, out_dtype=BF16),
            },
            (x, h, starts, sizes),
            flops=2.0 * rows * hidden * inner,
        )


def bench_logprob(full: bool) -> None:
    m, k, v, leaves = 10240, 2048, 248320, 8
    hidden, head = normal(1, m, k), normal(2, k, v) * jnp.asarray(0.02, BF16)
    targets = jax.random.randint(jax.random.key(3), (m,), 0, v)

    def dot(hidden, head, targets):
        return jnp.dot(hidden, head)  # stores [M, V] bfloat16: the product alone

    tiles = {
        "rows band16": MatmulTile(64, 256, minor=0, band=16),
        "rows band8": MatmulTile(64, 256, minor=0, band=8),
        "cols band8": MatmulTile(64, 256, minor=1, band=8),
    }

    def forward(hidden, head, targets, tile=None):
        maximum, total, logit = linear_logprob_stats(
            hidden, head, targets, leaves=leaves, tile=tile
        )
        return logit - combine_leaves(maximum, total)

    def backward(hidden, head, targets, lse, grad):
        return linear_logprob_backward(hidden, head, targets, lse, grad, leaves=leaves)

    def decode(x, head):
        logits = matmul(x, head, out_dtype=F32)
        return logits, combine_leaves(*logits_stats(logits, leaves=leaves))

    def logits_only(x, head):
        return jnp.dot(x, head, preferred_element_type=F32)

    lse, grad = jnp.full((m,), 12.0, F32), jax.random.normal(jax.random.key(5), (m,))
    call = (hidden, head, targets)
    cases = [("logprob", "xla dot", dot, call)]
    for name, tile in tiles.items():
        cases.append(("logprob forward", name, functools.partial(forward, tile=tile), call))
    cases.append(("logprob backward", "3 products", backward, (*call, lse, grad)))
    for rows in (1, 64, 256):
        x = hidden[:rows]
        cases.append((f"logprob decode M={rows}", "xla logits", logits_only, (x, head)))
        cases.append((f"logprob decode M={rows}", "logits and lse", decode, (x, head)))
    compiled = compile_all([case[2:] for case in cases])
    base = None
    for (case, name, _, arguments), function in zip(cases, compiled, strict=True):
        if isinstance(function, Exception):
            report(case, name, failed=f"{type(function).__name__}: {str(function)[:200]}")
            continue
        with exclusive():
            ms, out = time_ms(function, arguments, 2)
        base = base or ms
        memory = function.memory_analysis().temp_size_in_bytes / 2**30
        report(case, name, ms=ms, dots=ms / base, temp_gib=memory)
        if case == "logprob forward":
            logits = logits_only(hidden[:256], head)
            exact = jax.nn.log_softmax(logits)[jnp.arange(256), targets[:256]]
            report(case, name, max_error=float(jnp.abs(out[:256] - exact).max()))


class Checks:
    """Calls whose results must equal given ones bit by bit; compiled together, then run."""

    def __init__(self):
        self.calls, self.names, self.expected = [], [], []

    def add(self, name: str, function: Callable, arguments: tuple, expected) -> None:
        """`expected` is an array, or a function of the result that says whether it is right."""
        self.names.append(name)
        self.calls.append((function, arguments))
        self.expected.append(expected)

    def run(self) -> None:
        for name, call, expected, compiled in zip(
            self.names, self.calls, self.expected, compile_all(self.calls), strict=True
        ):
            if isinstance(compiled, Exception):
                report("exact", name, failed=f"{type(compiled).__name__}: {str(compiled)[:200]}")
                continue
            with exclusive():
                out = compiled(*call[1])
                ok = expected(out) if callable(expected) else same_bits(out, expected)
            report("exact", name, ok=bool(ok))


def exact_matmul(full: bool) -> None:
    """Rows do not depend on M, place, tile, swap, or on who owns which leaves."""
    k, n, most = 4096, 2048, 10240
    x, w = normal(1, most, k), normal(2, k, n)
    checks = Checks()
    for leaves in (1, 8):
        product = functools.partial(matmul, leaves=leaves, out_dtype=F32)
        whole = jax.jit(product)(x, w)
        for m in (1, 7, 9, 16, 64, 65, 128, 129, 256, 1000, 10239):
            checks.add(f"matmul G{leaves} M={m}", product, (x[:m], w), whole[:m])
        order = jax.random.permutation(jax.random.key(3), most)
        checks.add(f"matmul G{leaves} permuted", product, (x[order], w), whole[order])
        bf16 = functools.partial(product, out_dtype=BF16)
        checks.add(f"matmul G{leaves} bf16", bf16, (x, w), whole.astype(BF16))
        checks.add(f"matmul G{leaves} bf16 M=16", bf16, (x[:16], w), whole[:16].astype(BF16))
        for m, tiles in [
            (1000, TILES if leaves == 1 else LEAF_TILES),
            *((m, small_tiles(m)) for m in (1, 64, 256)),
        ]:
            for name, tile in fitting(tiles, leaves).items():
                tiled = functools.partial(product, tile=tile)
                checks.add(f"matmul G{leaves} M={m} {name}", tiled, (x[:m], w), whole[:m])
        nt = functools.partial(product, transpose_b=True)
        checks.add(f"matmul G{leaves} nt", nt, (x, w.T), whole)
        checks.add(f"matmul G{leaves} nt M=16", nt, (x[:16], w.T), whole[:16])
        checks.add(
            f"matmul G{leaves} tn", functools.partial(product, transpose_a=True), (x.T, w), whole
        )
    for ranks in (2, 4, 8):
        width = k // ranks

        def on_ranks(x, w, ranks=ranks, width=width):
            parts = [
                matmul(
                    x[:, i * width : (i + 1) * width],
                    w[i * width : (i + 1) * width],
                    leaves=8 // ranks,
                    out_dtype=F32,
                )
                for i in range(ranks)
            ]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        for m in (16, 1000):
            checks.add(f"matmul G8 on {ranks} ranks M={m}", on_ranks, (x[:m], w), whole[:m])
    checks.run()


def group_slices(starts, sizes) -> list[slice]:
    return [
        slice(int(s), int(s + c))
        for s, c in zip(np.asarray(starts), np.asarray(sizes), strict=True)
    ]


def exact_grouped(full: bool) -> None:
    """Rows do not depend on group sizes or tiles, weight gradients not on where a group lies."""
    groups, k, n = 32, 2048, 512
    w, w2 = normal(3, groups, k, n), normal(4, groups, k, n)
    sizes = expert_sizes(3000, groups, 1).at[5].set(0).at[7].set(1)
    starts = aligned_starts(sizes)
    spans = group_slices(starts, sizes)
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    x, dy = normal(5, 3600, k), normal(6, 3600, n)
    checks = Checks()
    product = functools.partial(grouped_matmul, out_dtype=F32)
    out = jax.jit(functools.partial(product, tile=MatmulTile(64, 256)))(x, w, starts, sizes)
    dense = functools.partial(matmul, out_dtype=F32)
    for g in (0, 7, 31):
        checks.add(f"grouped = matmul, group {g}", dense, (x[spans[g]], w[g]), out[spans[g]])
    for name, tile in {
        "128 wg1": MatmulTile(128, 128, warpgroups=1),
        "64x128": MatmulTile(64, 128),
        "swap 64x128": MatmulTile(64, 128, swap=True),
        "swap 64x32": MatmulTile(64, 32, stages=6, swap=True),
        "swap 64x8": MatmulTile(64, 8, stages=6, swap=True),
    }.items():
        tiled = functools.partial(product, tile=tile)
        checks.add(
            f"grouped {name}", lambda *a, f=tiled: f(*a)[rows], (x, w, starts, sizes), out[rows]
        )
    hidden = jax.jit(functools.partial(grouped_swiglu, tile=MatmulTile(64, 128)))(
        x, w, w2, starts, sizes
    )
    for tile in (
        MatmulTile(64, 64),
        MatmulTile(64, 32, stages=5, swap=True),
        MatmulTile(64, 16, warpgroups=1, swap=True),
    ):
        tiled = functools.partial(grouped_swiglu, tile=tile)
        checks.add(
            f"swiglu {tile.rows}x{tile.cols} swap={tile.swap}",
            lambda *a, f=tiled: f(*a)[rows],
            (x, w, w2, starts, sizes),
            hidden[rows],
        )
    dw = jax.jit(grouped_matmul_dw)(x, dy, starts, sizes)
    ahead = functools.partial(jnp.pad, pad_width=((8, 0), (0, 0)), constant_values=jnp.nan)
    checks.add("dw moved", grouped_matmul_dw, (ahead(x), ahead(dy), starts + 8, sizes), dw)
    narrow = functools.partial(grouped_matmul_dw, tile=MatmulTile(64, 128))
    checks.add("dw 64x128", narrow, (x, dy, starts, sizes), dw)
    for g in (0, 7, 31):
        checks.add(
            f"dw = matmul, group {g}",
            functools.partial(dense, transpose_a=True),
            (x[spans[g]], dy[spans[g]]),
            dw[g],
        )
    checks.add("dw of no rows", lambda d: d, (dw[5],), jnp.zeros_like(dw[5]))
    checks.add(
        "dw leaves",
        functools.partial(grouped_matmul_dw, leaves=2),
        (x, dy, starts, sizes),
        dw[::2] + dw[1::2],
    )
    checks.run()


def exact_logprob(full: bool) -> None:
    """Decoding's statistics and a vocabulary cut over ranks equal the training forward."""
    k, v, leaves, most = 2048, 248320, 8, 1000
    hidden, head = normal(1, most, k), normal(2, k, v) * jnp.asarray(0.02, BF16)
    targets = jax.random.randint(jax.random.key(3), (most,), 0, v)
    maximum, total, logit = jax.jit(functools.partial(linear_logprob_stats, leaves=leaves))(
        hidden, head, targets
    )
    lse = jax.jit(combine_leaves)(maximum, total)
    checks = Checks()

    def same(*expected):
        return lambda got: all(same_bits(a, b) for a, b in zip(got, expected, strict=True))

    def decode(x, head, targets):
        logits = matmul(x, head, out_dtype=F32)
        stats = logits_stats(logits, leaves=leaves)
        return logits[jnp.arange(x.shape[0]), targets], *stats, combine_leaves(*stats)

    for m in (1, 16, 100):
        expected = logit[:m], maximum[:, :m], total[:, :m], lse[:m]
        checks.add(
            f"logprob decode M={m}", decode, (hidden[:m], head, targets[:m]), same(*expected)
        )
    width = v // 8
    for ranks in (2, 8):
        per = 8 // ranks

        def on_ranks(hidden, head, targets, ranks=ranks, per=per):
            pieces = [
                linear_logprob_stats(
                    hidden,
                    head[:, i * per * width : (i + 1) * per * width],
                    targets - i * per * width,
                    leaves=per,
                )
                for i in range(ranks)
            ]
            maximum, total = (jnp.concatenate([p[j] for p in pieces]) for j in range(2))
            return maximum, total, sum(p[2] for p in pieces)

        arguments = hidden[:300], head, targets[:300]
        expected = maximum[:, :300], total[:, :300], logit[:300]
        checks.add(f"logprob on {ranks} ranks", on_ranks, arguments, same(*expected))
    one = functools.partial(
        linear_logprob_stats, leaves=leaves, tile=MatmulTile(64, 256, warpgroups=1)
    )
    checks.add("logprob wg1", one, (hidden, head, targets), same(maximum, total, logit))
    checks.run()


PARTS = {
    "matmul": bench_matmul,
    "decode": bench_decode,
    "grouped": bench_grouped,
    "logprob": bench_logprob,
    "exact_matmul": exact_matmul,
    "exact_grouped": exact_grouped,
    "exact_logprob": exact_logprob,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--full", action="store_true", help="try every tile, not the table's alone")
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    print(jax.devices()[0].device_kind, flush=True)
    for part in args.parts:
        try:
            PARTS[part](args.full)
        except Exception as failure:
            traceback.print_exc(limit=-4)
            report(part, "stopped", failed=f"{type(failure).__name__}: {str(failure)[:300]}")
    exact = [r for r in RESULTS if r["case"] == "exact"]
    if exact:
        report("exact summary", "all", checks=len(exact), wrong=sum(not r.get("ok") for r in exact))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": jax.devices()[0].device_kind, "results": RESULTS}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
