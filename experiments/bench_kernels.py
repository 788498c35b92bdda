"""Check and time the matrix kernels on a GPU, each beside its peer, and print one line a case.

    python experiments/bench_kernels.py matmul decode grouped logprob rows exact_leaves [--full]

Times are medians of CUPTI kernel times (sums over the kernels of one call). Calls cycle through
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

from pallas_kernels.grouped_matmul import (
    aligned_starts,
    grouped_matmul,
    grouped_swiglu,
    grouped_swiglu_backward,
)
from pallas_kernels.grouped_matmul_dw import grouped_matmul_dw
from pallas_kernels.linear_logprob import (
    Gradients,
    Statistics,
    combine_leaves,
    linear_logprob_stats,
    logits_stats,
)
from pallas_kernels.linear_logprob_backward import linear_logprob_backward
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul_columns import matmul_columns
from pallas_kernels.matmul_core import shared_bytes
from pallas_kernels.rows_convolution import convolution, convolution_backward
from pallas_kernels.rows_elementwise import (
    add,
    gated_add,
    gated_add_backward,
    sigmoid_gate,
    swiglu,
    swiglu_backward,
)
from pallas_kernels.rows_embedding import embedding_gradient
from pallas_kernels.rows_gates import gates
from pallas_kernels.rows_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    l2_norm,
    rms_norm,
    rms_norm_backward,
)
from pallas_kernels.rows_rotary import rotary
from pallas_kernels.rows_routing import combine_slots, slot_dots, take_rows
from pallas_kernels.rows_softmax import softmax, softmax_chosen
from pallas_kernels.rows_token_sum import token_sum
from pallas_kernels.tuning import SHARED_MEMORY, MatmulTile, matmul_tile

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


def time_ms(compiled: Callable, calls: Sequence[tuple], iterations: int):
    """Median over calls of the summed kernel times of one, in ms, and the first call's result.

    Args:
      compiled: a compiled function.
      calls: arguments to cycle through, so that what one call read does not lie in L2 for the next.
      iterations: rounds over `calls`.
    """
    jax.block_until_ready([compiled(*arguments) for arguments in calls])
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    first = None
    try:
        for _ in range(iterations):
            for arguments in calls:
                out = jax.block_until_ready(compiled(*arguments))
                first = out if first is None else first
    finally:
        times = [ms for _, ms in cupti._cupti_get_timings(True)]
    kernels = len(times) // (iterations * len(calls))
    sums = [sum(times[i : i + kernels]) for i in range(0, len(times), kernels)]
    return statistics.median(sums), first


def report(case: str, name: str, **values) -> None:
    RESULTS.append({"case": case, "name": name, **values})
    text = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )
    print(f"{case:34s} {name:22s} {text}", flush=True)


def compare(case, functions, *calls, flops=0.0, nbytes=0.0, iterations=8, first=None):
    """Time `functions`, the first being the peer, on the same calls, and compare their results."""
    compiled = compile_all([(function, calls[0]) for function in functions.values()])
    reference = peer = None
    for name, function in zip(functions, compiled, strict=True):
        if isinstance(function, Exception):
            report(case, name, failed=f"{type(function).__name__}: {str(function)[:200]}")
            continue
        try:
            with exclusive():
                ms, out = time_ms(function, calls, iterations)
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
    "64x256 rows band8": MatmulTile(rows=64, cols=256, minor=0),
    "64x256 rows band16": MatmulTile(rows=64, cols=256, minor=0, band=16),
    "64x192 rows band16": MatmulTile(rows=64, cols=192, slots=3, minor=0, band=16),
    "128x128 rows band16": MatmulTile(rows=128, cols=128, minor=0, band=16),
}
LEAF_TILES = {
    "64x128 s5": MatmulTile(rows=64, cols=128, stages=5),
    "64x128 s4": MatmulTile(rows=64, cols=128),
}


def small_tiles(m: int) -> dict[str, MatmulTile]:
    cols = m + -m % 8
    if cols <= 64:
        return {
            f"swap 64x{cols} s{stages}": MatmulTile(
                rows=64, cols=cols, warpgroups=1, stages=stages, swap=True
            )
            for stages in (8, 12, 16)
        }
    return {
        "64x128 wg1 s8": MatmulTile(64, 128, warpgroups=1, stages=8),
        "64x64 wg1 s12": MatmulTile(64, 64, warpgroups=1, stages=12),
        "64x256 wg2": MatmulTile(64, 256),
        "64x128 wg2 s5": MatmulTile(64, 128, stages=5),
        "swap 64x256 wg1": MatmulTile(64, 256, warpgroups=1, slots=1, swap=True),
    }


def fits(tile: MatmulTile, leaves: int) -> bool:
    """Whether there is room for a tile's sums, and a block can have its shared memory."""
    try:
        return shared_bytes(tile, leaves, F32) <= SHARED_MEMORY
    except ValueError:
        return False


def fitting(tiles: dict[str, MatmulTile], leaves: int) -> dict[str, MatmulTile]:
    return {name: tile for name, tile in tiles.items() if fits(tile, leaves)}


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
            tiles = {"table": matmul_tile(m, n, k, leaves)}
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

            tiles = fitting(small_tiles(m), leaves)
            if not full:
                tiles = {"table": matmul_tile(m, n, k, leaves)}
            functions = {"xla dot": jnp.dot}
            for name, tile in tiles.items():
                functions[name] = functools.partial(matmul, leaves=leaves, tile=tile)
            case = f"decode {m}x{n}x{k} G{leaves}"
            compare(case, functions, *((x, b) for b in w), nbytes=2.0 * k * n, iterations=3)
    bench_one_input()


# Widths of the weights of one input, K = 2048, in the 35B model.
ONE_INPUT = {
    "gated delta": (2048, 2048, 4096, 4096, 32, 32),
    "attention": (4096, 512, 512, 4096),
    "shared expert": (512, 512),
}


def bench_one_input() -> None:
    def apart(product):
        return lambda x, ws: tuple(product(x, w) for w in ws)

    functions = {
        "xla dots": apart(jnp.dot),
        "a launch a weight": apart(matmul),
        "one launch": matmul_columns,
    }
    for name, widths in ONE_INPUT.items():
        nbytes = 2.0 * 2048 * sum(widths)
        copies = max(8, -(-160_000_000 // int(nbytes)))
        ws = [tuple(normal(i, 2048, n) for n in widths) for i in range(copies)]
        for m in (1, 16, 64, 256):
            calls = ((normal(99, m, 2048), set_) for set_ in ws)
            compare(f"decode {name} M={m}", functions, *calls, nbytes=nbytes, iterations=3)


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
                "64 wg2 s4": (MatmulTile(64, 256), MatmulTile(64, 128)),
                "64 wg2 s3 slots4": (
                    MatmulTile(64, 256, stages=3, slots=4),
                    MatmulTile(64, 128, stages=3, slots=2),
                ),
                "swap 64x128": (
                    MatmulTile(64, 128, stages=5, swap=True),
                    MatmulTile(64, 128, stages=4, swap=True),
                ),
                "swap 64x64": (
                    MatmulTile(64, 64, stages=8, swap=True),
                    MatmulTile(64, 64, stages=5, swap=True),
                ),
                "swap 128x128, turns": (
                    MatmulTile(128, 128, swap=True),
                    MatmulTile(64, 128, stages=6, swap=True, turns=True),
                ),
                "turns 128x128": (
                    MatmulTile(128, 128, stages=6, turns=True),
                    MatmulTile(64, 64, stages=6, turns=True),
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

        functions = {
            name: lambda x, g, u, st, sz, t=t: grouped_swiglu(x, g, u, st, sz, tile=t[1])
            for name, t in tiles.items()
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
                "64x128 s6": lambda x, h, st, sz: grouped_matmul_dw(
                    x, h, st, sz, tile=MatmulTile(64, 128, stages=6)
                ),
                "64x128 s4 slots4": lambda x, h, st, sz: grouped_matmul_dw(
                    x, h, st, sz, tile=MatmulTile(64, 128, slots=4)
                ),
                "64x256 s3 slots4": lambda x, h, st, sz: grouped_matmul_dw(
                    x, h, st, sz, tile=MatmulTile(64, 256, stages=3, slots=4)
                ),
                "bf16 out": lambda x, h, st, sz: grouped_matmul_dw(
                    x, h, st, sz, out_dtype=BF16, tile=MatmulTile(64, 128, slots=4)
                ),
            },
            (x, h, starts, sizes),
            flops=2.0 * rows * hidden * inner,
        )
        dy = normal(9, capacity, hidden)
        keeping = functools.partial(grouped_swiglu, keep=True)
        products = jax.jit(keeping)(x, gate, up, starts, sizes)[1]
        compare(
            f"experts gate+up that keeps its products {rows}",
            {"table": keeping},
            (x, gate, up, starts, sizes),
            flops=4.0 * rows * hidden * inner,
            nbytes=2.0 * (2 * gate.size + rows * (hidden + inner)) + 8.0 * rows * inner,
            first=keep,
        )
        compare(
            f"experts swiglu backward {rows}",
            {"table": grouped_swiglu_backward},
            (products, down, dy, starts, sizes),
            flops=2.0 * rows * hidden * inner,
            nbytes=2.0 * (down.size + rows * (hidden + 3 * inner)) + 8.0 * rows * inner,
            first=keep,
        )


def bench_logprob(full: bool) -> None:
    m, k, v, leaves = 10240, 2048, 248320, 8
    hidden, head = normal(1, m, k), normal(2, k, v) * jnp.asarray(0.02, BF16)
    targets = jax.random.randint(jax.random.key(3), (m,), 0, v)

    def dot(hidden, head, targets):
        return jnp.dot(hidden, head)  # stores [M, V] bfloat16: the product alone

    tiles = {
        "rows band8": MatmulTile(64, 256, minor=0, band=8),
        "rows band20": MatmulTile(64, 256, minor=0, band=20),
        "rows band80": MatmulTile(64, 256, minor=0, band=80),
    }

    one, all_kept = jnp.ones((m,), F32), jnp.full((m,), -jnp.inf)

    def forward(hidden, head, targets, threshold=None, tile=None):
        stats, logit = linear_logprob_stats(
            hidden, head, targets, one, threshold, leaves=leaves, tile=tile
        )
        return combine_leaves(stats, logit)

    def backward(hidden, head, targets, gradients):
        return linear_logprob_backward(hidden, head, targets, one, gradients, leaves=leaves)

    def kernel_logits(x, head):
        return matmul(x, head, out_dtype=F32)

    def decode(x, head):
        z = kernel_logits(x, head) * one[: x.shape[0], None]
        stats = logits_stats(z, all_kept[: x.shape[0]], leaves=leaves)
        return z, combine_leaves(stats, z[:, 0])

    def logits_only(x, head):
        return jnp.dot(x, head, preferred_element_type=F32)

    lse, grad = jnp.full((m,), 12.0, F32), jax.random.normal(jax.random.key(5), (m,))
    call = (hidden, head, targets)
    cases = [("logprob", "xla dot", dot, call)]
    for name, tile in tiles.items():
        cases.append(("logprob forward", name, functools.partial(forward, tile=tile), call))
    cases.append(("logprob forward", "kept set too", forward, (*call, all_kept)))
    for name, kept in (("full", None), ("full and kept", (all_kept, lse, grad))):
        cases.append(("logprob backward", name, backward, (*call, Gradients(lse, grad, kept))))
    for rows in (1, 64, 256):
        x = hidden[:rows]
        cases.append((f"logprob decode M={rows}", "xla logits", logits_only, (x, head)))
        cases.append((f"logprob decode M={rows}", "logits", kernel_logits, (x, head)))
        cases.append((f"logprob decode M={rows}", "logits, statistics", decode, (x, head)))
    compiled = compile_all([case[2:] for case in cases])
    base = None
    for (case, name, _, arguments), function in zip(cases, compiled, strict=True):
        if isinstance(function, Exception):
            report(case, name, failed=f"{type(function).__name__}: {str(function)[:200]}")
            continue
        with exclusive():
            ms, out = time_ms(function, [arguments], 3)
        base = base or ms
        memory = function.memory_analysis().temp_size_in_bytes / 2**30
        report(case, name, ms=ms, dots=ms / base, temp_gib=memory)
        if case == "logprob forward":
            logits = logits_only(hidden[:256], head)
            exact = jax.nn.log_softmax(logits)[jnp.arange(256), targets[:256]]
            report(case, name, max_error=float(jnp.abs(out.full[:256] - exact).max()))


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


def exact_matmul(leaves: int) -> None:
    """Rows do not depend on M, place, tile, swap, or on who owns which leaves."""
    k, n, most = 4096, 2048, 10240
    x, w = normal(1, most, k), normal(2, k, n)
    product = functools.partial(matmul, leaves=leaves, out_dtype=F32)
    bf16 = functools.partial(product, out_dtype=BF16)
    whole = jax.jit(product)(x, w)
    checks = Checks()
    for m in (1, 9, 64, 65, 129, 256, 1000):
        checks.add(f"matmul G{leaves} M={m}", product, (x[:m], w), whole[:m])
    order = jax.random.permutation(jax.random.key(3), most)
    checks.add(f"matmul G{leaves} permuted", product, (x[order], w), whole[order])
    checks.add(f"matmul G{leaves} bf16", bf16, (x, w), whole.astype(BF16))
    checks.add(f"matmul G{leaves} bf16 M=16", bf16, (x[:16], w), whole[:16].astype(BF16))
    for m, tiles in [
        (1000, TILES if leaves == 1 else LEAF_TILES),
        *((m, small_tiles(m)) for m in (16, 64, 256)),
    ]:
        for name, tile in fitting(tiles, leaves).items():
            tiled = functools.partial(product, tile=tile)
            checks.add(f"matmul G{leaves} M={m} {name}", tiled, (x[:m], w), whole[:m])
    nt, tn = (functools.partial(product, **{f"transpose_{side}": True}) for side in "ba")
    checks.add(f"matmul G{leaves} nt", nt, (x, w.T), whole)
    checks.add(f"matmul G{leaves} nt M=16", nt, (x[:16], w.T), whole[:16])
    checks.add(f"matmul G{leaves} tn", tn, (x.T, w), whole)
    for ranks in (2, 4, 8) if leaves == 8 else ():

        def on_ranks(x, w, ranks=ranks):
            width = k // ranks
            parts = [
                matmul(
                    x[:, i * width : (i + 1) * width],
                    w[i * width : (i + 1) * width],
                    leaves=leaves // ranks,
                    out_dtype=F32,
                )
                for i in range(ranks)
            ]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        checks.add(f"matmul G8 on {ranks} ranks", on_ranks, (x[:300], w), whole[:300])
    checks.run()


def exact_columns(full: bool) -> None:
    exact_matmul(1)
    exact_one_input()


def all_same_bits(results: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
    return all(map(same_bits, results, others))


def exact_one_input() -> None:
    """One launch for several weights has the bits of a launch for each."""
    checks = Checks()
    for name, widths in (ONE_INPUT | {"ragged": (1, 32, 520, 64)}).items():
        ws = tuple(normal(i, 2048, n) for i, n in enumerate(widths))
        for m in (1, 9, 16, 64, 65, 129, 256):
            x = normal(99, m, 2048)
            apart = [matmul(x, w) for w in ws]
            same = functools.partial(all_same_bits, apart)
            checks.add(f"{name} M={m}", matmul_columns, (x, ws), same)
    checks.run()


def exact_leaves(full: bool) -> None:
    exact_matmul(8)


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
    checks.run()


def exact_logprob(full: bool) -> None:
    """Decoding's statistics and a vocabulary cut over ranks equal the training forward."""
    k, v, leaves, most = 2048, 248320, 8, 1000
    hidden, head = normal(1, most, k), normal(2, k, v) * jnp.asarray(0.02, BF16)
    targets = jax.random.randint(jax.random.key(3), (most,), 0, v)
    inverse = jax.random.uniform(jax.random.key(4), (most,), F32, 0.7, 1.5)
    threshold = jax.random.normal(jax.random.key(5), (most,))
    rows = hidden, targets, inverse, threshold

    def train(x, targets, inverse, threshold, head, tile=None):
        stats, logit = linear_logprob_stats(
            x, head, targets, inverse, threshold, leaves=leaves, tile=tile
        )
        return *stats, logit, *combine_leaves(stats, logit)

    def decode(x, targets, inverse, threshold, head):
        z = matmul(x, head, out_dtype=F32) * inverse[:, None]
        stats = logits_stats(z, threshold, leaves=leaves)
        logit = z[jnp.arange(x.shape[0]), targets]
        return *stats, logit, *combine_leaves(stats, logit)

    def on_ranks(x, targets, inverse, threshold, head, ranks):
        per = leaves // ranks
        width = v // ranks
        pieces = [
            linear_logprob_stats(
                x,
                head[:, i * width : (i + 1) * width],
                targets - i * width,
                inverse,
                threshold,
                leaves=per,
            )
            for i in range(ranks)
        ]
        stats = Statistics(*map(jnp.concatenate, zip(*(p[0] for p in pieces), strict=True)))
        logit = functools.reduce(jnp.maximum, [p[1] for p in pieces])
        return *stats, logit, *combine_leaves(stats, logit)

    whole = jax.jit(train)(*rows, head)
    checks = Checks()

    def same(m):
        return lambda got: all(same_bits(a, b[..., :m]) for a, b in zip(got, whole, strict=True))

    for m in (1, 16, 100):
        checks.add(f"logprob decode M={m}", decode, (*(x[:m] for x in rows), head), same(m))
    for ranks in (2, 8):
        split = functools.partial(on_ranks, ranks=ranks)
        checks.add(f"logprob {ranks} ranks", split, (*(x[:300] for x in rows), head), same(300))

    def unfiltered(x, targets, inverse, head):
        stats, logit = linear_logprob_stats(x, head, targets, inverse, leaves=leaves)
        return stats.maximum, stats.total, logit

    expected = whole[0], whole[1], whole[3]
    checks.add(
        "logprob without a threshold",
        unfiltered,
        (hidden, targets, inverse, head),
        lambda got: all(same_bits(a, b) for a, b in zip(got, expected, strict=True)),
    )
    one = functools.partial(train, tile=MatmulTile(64, 256, warpgroups=1))
    checks.add("logprob wg1", one, (*rows, head), same(most))
    checks.run()


def exact_rows(full: bool) -> None:
    """A row op's row does not depend on how many rows there are, or on where it lies."""
    most, width = 1003, 2048
    x, g, w = normal(1, most, width), normal(2, most, width), normal(3, width)
    gate, table = normal(4, most), jax.random.normal(jax.random.key(5), (2, most, 32))
    narrow = jax.random.normal(jax.random.key(6), (most, 256))
    weights = jnp.linspace(-6, 3, 32), jnp.linspace(-6, 3, 32)
    norm = dict(epsilon=1e-6, zero_centered=True)
    ops = {
        "rms_norm": (lambda x: rms_norm(x, w, **norm), (x,)),
        "rms_norm_backward": (lambda x, g: rms_norm_backward(x, w, g, **norm), (x, g)),
        "gated_rms_norm": (lambda x, g: gated_rms_norm(x, g, w, epsilon=1e-6), (x, g)),
        "l2_norm": (functools.partial(l2_norm, epsilon=1e-6), (x,)),
        "swiglu": (swiglu, (x, g)),
        "swiglu_backward": (lambda x, g: swiglu_backward(x, g, x), (x, g)),
        "sigmoid_gate": (sigmoid_gate, (x, g)),
        "gated_add": (gated_add, (x, g, gate)),
        "gated_add_backward": (lambda g, gate, x: gated_add_backward(g, gate, x), (g, gate, x)),
        "gates": (lambda a, b: gates(a, b, *weights), (narrow[:, :32], narrow[:, 32:64])),
        "softmax": (softmax, (narrow,)),
        "softmax_chosen": (softmax_chosen, (narrow[:, :8],)),
        "rotary": (
            lambda x, c, s: rotary(x.reshape(-1, 8, 256), c, s),
            (x, jnp.cos(table[0]), jnp.sin(table[1])),
        ),
    }
    checks = Checks()
    order = jax.random.permutation(jax.random.key(7), most)
    for name, (function, arguments) in ops.items():
        whole = jax.tree.leaves(jax.jit(function)(*arguments))

        def same(index, whole=whole):
            return lambda got: all(
                same_bits(a, b[index]) for a, b in zip(jax.tree.leaves(got), whole, strict=True)
            )

        for m in (1, 5, 64):
            checks.add(f"{name} M={m}", function, tuple(a[:m] for a in arguments), same(slice(m)))
        checks.add(f"{name} permuted", function, tuple(a[order] for a in arguments), same(order))
    checks.run()


def bench_rows(full: bool) -> None:
    """Memory-bound ops at 10240 rows of the 35B model, beside a copy of the same size."""
    t, h = 10240, 2048
    x, g, d, w = normal(1, t, h), normal(2, t, h), normal(3, t, h), normal(4, h)
    heads, hg, hw = normal(5, t * 32, 128), normal(6, t * 32, 128), normal(7, 128)
    q, table = normal(8, t, 16, 256), jax.random.normal(jax.random.key(9), (t, 32))
    channels, taps = normal(10, t, 8192), normal(11, 8192, 4)
    source = jnp.arange(t)[:, None] - jnp.arange(3, -1, -1)
    source = jnp.where(source < 0, -1, source).astype(jnp.int32)
    follower = jnp.arange(t)[:, None] + jnp.arange(3, -1, -1)
    follower = jnp.where(follower >= t, -1, follower).astype(jnp.int32)
    state = normal(12, 768, 8192)
    terms = jax.random.normal(jax.random.key(13), (t, h))
    y = normal(14, t * 8, h)
    place = jax.random.permutation(jax.random.key(15), t * 8).reshape(t, 8).astype(jnp.int32)
    weights = jax.random.uniform(jax.random.key(16), (t, 8))
    tokens = jax.random.randint(jax.random.key(17), (t,), 0, 248320)
    norm = dict(epsilon=1e-6, zero_centered=True)
    # name, function, arguments, elements of 2 bytes that must move
    norm_of_heads = functools.partial(rms_norm, w=w[:256], **norm)
    gated = functools.partial(gated_rms_norm, w=hw, epsilon=1e-6)
    gated_backward = functools.partial(gated_rms_norm_backward, w=hw, epsilon=1e-6)

    def conv_backward(c):
        return convolution_backward(c, taps, source, follower, c, 8)

    cases = [
        ("copy", lambda c: c[::-1], (channels,), 2 * channels.size),
        ("rms_norm", lambda x: rms_norm(x, w, **norm), (x,), 2 * x.size),
        ("rms_norm_backward", lambda x, d: rms_norm_backward(x, w, d, **norm), (x, d), 5 * x.size),
        ("rms_norm of heads", norm_of_heads, (q.reshape(-1, 256),), 2 * q.size),
        ("gated_rms_norm", gated, (heads, hg), 3 * heads.size),
        (
            "gated_rms_norm_backward",
            lambda a, b: gated_backward(a, b, dy=a),
            (heads, hg),
            6 * heads.size,
        ),
        ("l2_norm", functools.partial(l2_norm, epsilon=1e-6), (heads,), 2 * heads.size),
        ("add", add, (x, g), 3 * x.size),
        ("swiglu", swiglu, (x, g), 3 * x.size),
        ("swiglu_backward", swiglu_backward, (x, g, d), 5 * x.size),
        ("sigmoid_gate", sigmoid_gate, (heads, hg), 3 * heads.size),
        ("gated_add", lambda x, g: gated_add(x, g, x[:, 0]), (x, g), 3 * x.size),
        ("rotary", lambda q: rotary(q, table, table), (q,), 2 * q.size),
        (
            "convolution",
            lambda c: convolution(c, taps, state, source),
            (channels,),
            2 * channels.size,
        ),
        ("convolution_backward", conv_backward, (channels,), 3 * channels.size),
        ("token_sum", lambda a: token_sum(a, 8), (terms,), 2 * terms.size),
        (
            "gates",
            lambda a: gates(a, a, table[0], table[1]),
            (x[:, :32],),
            6 * t * 32,
        ),
        ("take_rows", lambda x: take_rows(x, place.reshape(-1) // 8), (x,), 9 * x.size),
        ("combine_slots", lambda y: combine_slots(y, place, weights), (y,), 9 * x.size),
        ("slot_dots", lambda y: slot_dots(y, place, x), (y,), 9 * x.size),
        ("softmax_chosen", softmax_chosen, (weights,), 4 * weights.size),
        (
            "embedding_gradient",
            lambda d: embedding_gradient(tokens, d, 248320, 8),
            (d,),
            248320 * h * 2,
        ),
    ]
    compiled = compile_all([(function, arguments) for _, function, arguments, _ in cases])
    for (name, _, arguments, elements), function in zip(cases, compiled, strict=True):
        if isinstance(function, Exception):
            report("rows", name, failed=f"{type(function).__name__}: {str(function)[:200]}")
            continue
        with exclusive():
            ms, _ = time_ms(function, [arguments], 5)
        report("rows", name, ms=ms, tb_s=2.0 * elements / ms / 1e9)


PARTS = {
    "matmul": bench_matmul,
    "decode": bench_decode,
    "grouped": bench_grouped,
    "logprob": bench_logprob,
    "rows": bench_rows,
    "exact_columns": exact_columns,
    "exact_leaves": exact_leaves,
    "exact_grouped": exact_grouped,
    "exact_logprob": exact_logprob,
    "exact_rows": exact_rows,
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
