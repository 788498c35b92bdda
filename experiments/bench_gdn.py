"""Time the gated delta rule on one Hopper GPU, and check its bits there.

Cases (16 key and 32 value heads of 128, bfloat16): train forward + backward of 1x10240, forward
alone, prefill of 5x2048, decode of 256x1 (mid-chunk, and with every sequence completing its chunk).
Each case runs in a process of its own. Device time is the sum of kernel durations in a profiler
trace, median over repetitions; `wall` is the time of a call in a queue of calls.

usage: python experiments/bench_gdn.py [--json FILE] [case ...]
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = ("bits", "gradient", "train", "train_forward", "prefill", "decode", "decode_fold")
HK, HV, WIDTH, CHUNK = 16, 32, 128, 64


def draw(length: int, seed: int = 0, heads: tuple[int, int] = (HK, HV)):
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)
    take = lambda *s: jnp.asarray(rng.normal(size=(length, *s)), jnp.bfloat16)  # noqa: E731
    key_heads, value_heads = heads
    rows = (take(key_heads, WIDTH), take(key_heads, WIDTH), take(value_heads, WIDTH))
    return *rows, take(value_heads), take(value_heads)


def weights(value_heads: int = HV):
    import jax.numpy as jnp

    return jnp.linspace(-3.0, 1.0, value_heads), jnp.linspace(-2.0, 1.0, value_heads)


def batch_of(portions, rows: int, piece_rows: int = CHUNK):
    """portions: (slot, first position, count) in row order."""
    from isojax.batch import Bucket, Segment, build

    pieces = sum(-(-count // CHUNK) + 1 for _, _, count in portions)
    bucket = Bucket(rows, len(portions), max(1, pieces), 1, piece_rows)
    return build([Segment([0] * n, at, [], slot) for slot, at, n in portions], bucket, CHUNK)


def exact_batch(lengths, slots=None):
    from isojax.batch import Bucket, Segment, build

    bucket = Bucket(sum(lengths), len(lengths), sum(-(-n // CHUNK) for n in lengths), 1, CHUNK)
    return build([Segment([0] * n, 0, [], i) for i, n in enumerate(lengths)], bucket, CHUNK)


def device_times(call, repetitions: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of all kernels of a call, and by kernel name, from a profiler trace."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repetitions):
                call()
        path = next(Path(folder).rglob("*.xplane.pb"))
        names: dict[str, float] = {}
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    names[event.name] = names.get(event.name, 0.0) + event.duration_ns / 1e6
    names = {name: total / repetitions for name, total in names.items()}
    return sum(names.values()), names


def timed(step, state, repetitions: int = 20) -> dict:
    """step(what it returned last, at first `state`), queued; the state is donated from call to
    call."""
    import jax

    holder = [step(state)]

    def call():
        holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])

    call()
    walls = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repetitions):
            holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])
        walls.append((time.perf_counter() - start) / repetitions * 1e3)
    total, names = device_times(call, 5)
    top = dict(sorted(names.items(), key=lambda item: -item[1])[:14])
    return {"device_ms": total, "wall_ms": statistics.median(walls), "kernels": top}


def run_times(case: str) -> dict:
    import jax
    import jax.numpy as jnp

    from isojax.numerics.policy import Policy
    from isojax.ops.gated_delta import gated_delta, init_state

    policy = Policy(evaluation="mosaic")
    layer = jnp.int32(0)
    if case.startswith("decode"):
        row = CHUNK - 1 if case == "decode_fold" else 31
        portions = [(i, CHUNK + row, 1) for i in range(256)]
        batch, count, slots = batch_of(portions, 256, 1), 256, 256
    elif case == "prefill":
        batch, count, slots = exact_batch([2048] * 5), 5 * 2048, 5
    else:
        batch, count, slots = exact_batch([10240]), 10240, 1
    args = (*draw(count), *weights())
    state = init_state(1, slots, HK, HV, WIDTH, WIDTH, policy)
    noise = jax.random.normal(jax.random.key(0), state.state.shape)
    state = dataclasses.replace(state, state=noise, operand=noise.astype(jnp.bfloat16))

    if case == "train":
        weight = draw(count, 1)[2]

        def call(state, *args):
            f = lambda *x: gated_delta(*x, state, layer, batch, policy=policy)  # noqa: E731
            _, pull, after = jax.vjp(f, *args, has_aux=True)
            return after, pull(weight)

    else:

        def call(state, *args):
            out, after = gated_delta(*args, state, layer, batch, policy=policy)
            return after, out

    step = jax.jit(call, donate_argnums=0)
    return timed(lambda last: step(last[0], *args), (state, None))


def recurrence(q, k, v, a, b, A_log, dt_bias):
    """Float64, one token after the other."""
    import numpy as np

    q, k, v, a, b, A_log, dt_bias = (
        np.asarray(x.astype("float32"), np.float64) for x in (q, k, v, a, b, A_log, dt_bias)
    )
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    group = v.shape[1] // k.shape[1]
    q, k = np.repeat(unit(q) * WIDTH**-0.5, group, 1), np.repeat(unit(k), group, 1)
    g, beta = -np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), 1 / (1 + np.exp(-b))
    state, out = np.zeros((v.shape[1], WIDTH, WIDTH)), []
    for t in range(len(q)):
        state *= np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - (state * k[t][:, :, None]).sum(1))
        state += k[t][:, :, None] * d[:, None, :]
        out.append((state * q[t][:, :, None]).sum(1))
    return np.stack(out)


def run_bits() -> dict:
    """A sequence of 200 tokens whole, at splits, and by decode, beside others, in dirty slots."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from isojax.numerics.policy import Policy
    from isojax.ops.gated_delta import gated_delta, init_state

    policy, length = Policy(evaluation="mosaic"), 200
    x, y = draw(length, 1), draw(length, 2)
    gates = weights()
    empty = init_state(1, 6, HK, HV, WIDTH, WIDTH, policy)
    dirty = jax.tree.map(lambda z: jnp.full_like(z, jnp.nan), empty)

    def feed(state, portions, piece_rows=CHUNK):
        rows = 512 if piece_rows == CHUNK else 4
        from isojax.batch import Bucket, Segment, build

        bucket = Bucket(rows, 4, 12 if piece_rows == CHUNK else 4, 1, piece_rows)
        segments = [Segment([0] * (e - f), f, [], slot) for _, slot, f, e in portions]
        batch = build(segments, bucket, CHUNK)
        parts = [jnp.concatenate([z[i][f:e] for z, _, f, e in portions]) for i in range(5)]
        parts = [
            jnp.pad(z, [(0, rows - z.shape[0])] + [(0, 0)] * (z.ndim - 1), constant_values=jnp.nan)
            for z in parts
        ]
        out, state = gated_delta(*parts, *gates, state, jnp.int32(0), batch, policy=policy)
        edges = np.cumsum([e - f for _, _, f, e in portions])
        return np.split(np.asarray(out.view(jnp.int16)), edges)[:-1], state

    whole = feed(dirty, [(x, 0, 0, length)])[0][0]
    result: dict = {}
    got = np.asarray(jnp.asarray(whole).view(jnp.bfloat16).astype(jnp.float32), np.float64)
    want = recurrence(*x, *gates)
    result["error"] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    differ = lambda z: int((np.concatenate(z) != whole).sum())  # noqa: E731
    result["beside"] = differ([feed(dirty, [(y, 1, 0, 77), (x, 4, 0, length)])[0][1]])
    for split in (1, 15, 63, 64, 65, 100, 128, 199):
        (_, first), state = feed(dirty, [(y, 1, 0, 40), (x, 3, 0, split)])
        (rest, _), state = feed(state, [(x, 3, split, length), (y, 1, 40, 45)])
        result[f"split {split}"] = differ([first, rest])
    for start in (0, 50):
        rows, state = [], dirty
        if start:
            (first,), state = feed(state, [(x, 2, 0, start)])
            rows.append(first)
        for t in range(start, 140):
            portions = [(y, 0, t - start, t - start + 1), (x, 2, t, t + 1)]
            out, state = feed(state, portions, 1)
            rows.append(out[-1])
        (last,), state = feed(state, [(x, 2, 140, length)])
        result[f"decode from {start}"] = differ([*rows, last])
    return result


def run_gradient() -> dict:
    """Errors of the gradients beside the reference's, and whether two runs give the same bits."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from isojax.numerics.policy import Policy
    from isojax.ops.gated_delta import gated_delta, init_state

    batch, heads = exact_batch([200, 120]), (2, 4)
    args = (*draw(320, 3, heads), *weights(4))
    weight = draw(320, 4, heads)[2]
    grads = {}
    for policy in (Policy(), Policy(evaluation="mosaic"), Policy(compute_dtype="float32")):
        dtype = policy.dtype
        cast = [z.astype(dtype) if z.dtype == jnp.bfloat16 else z for z in args]
        state = init_state(1, 2, *heads, WIDTH, WIDTH, policy)

        def loss(*z, policy=policy, state=state):
            out = gated_delta(*z, state, jnp.int32(0), batch, policy=policy)[0]
            return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32))

        f = jax.jit(jax.grad(loss, tuple(range(7))))
        grads[policy] = [[np.asarray(z.astype(jnp.float32)) for z in f(*cast)] for _ in range(2)]
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
    reference, mosaic, exact = grads.values()
    error = lambda x, y: float(np.linalg.norm(x - y) / np.linalg.norm(y))  # noqa: E731
    return {
        "repeat differs": sum(
            int((x.view(np.int32) != y.view(np.int32)).sum()) for x, y in zip(*mosaic, strict=True)
        ),
        "mosaic": dict(zip(names, map(error, mosaic[0], exact[0]), strict=True)),
        "reference": dict(zip(names, map(error, reference[0], exact[0]), strict=True)),
    }


def run_case(case: str) -> dict:
    if case == "bits":
        return run_bits()
    if case == "gradient":
        return run_gradient()
    return run_times(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=int, default=150, help="seconds for a case")
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run_case(options.one)))
        return
    results = {}
    for case in options.cases:
        command = [sys.executable, __file__, "--one", case]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{case}: no answer in {options.timeout} s", flush=True)
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{case}: failed\n{done.stderr[-1500:]}", flush=True)
            continue
        result = results[case] = json.loads(lines[-1][len("RESULT ") :])
        kernels = result.pop("kernels", {})
        print(f"{case}: {json.dumps(result)}", flush=True)
        for name, ms in kernels.items():
            print(f"    {ms:8.4f} ms  {name[:90]}", flush=True)
        result["kernels"] = kernels
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
