"""The gated delta kernels: interpreted, against the reference; lowered at the 35B shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.batch import Bucket, Segment, build
from isojax.numerics.policy import Policy
from isojax.ops.gated_delta import gated_delta, init_state
from pallas_kernels import gated_delta_prefill

HK, HV, K, V, C = 1, 2, 64, 64, 64
MOSAIC, REFERENCE = Policy(evaluation="mosaic"), Policy()
WEIGHTS = jnp.asarray([0.3, -3.0]), jnp.asarray([1.0, -1.0])


def tokens(length, seed, width=K):
    rng = np.random.default_rng(seed)
    draw = lambda *s: jnp.asarray(rng.normal(size=(length, *s)), jnp.bfloat16)  # noqa: E731
    return draw(HK, width), draw(HK, width), draw(HV, V), draw(HV), draw(HV)


def dirty(policy, width=K):
    state = init_state(2, 3, HK, HV, width, V, policy)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)


def feed(policy, state, portions, piece_rows=C):
    """portions: (sequence arrays, slot, first, end) -> outputs, one array, and the state."""
    count = sum(end - first for _, _, first, end in portions)
    pieces = sum(-(-end // C) - first // C for _, _, first, end in portions)
    # one unused piece; more would only take the interpreter's time
    bucket = Bucket(count + 3, 3, pieces + 1, 1, C) if piece_rows == C else Bucket(2, 2, 2, 1, 1)
    batch = build([Segment([0] * (e - f), f, [], s) for _, s, f, e in portions], bucket, C)
    pad = bucket.tokens - count
    rows = []
    for i in range(5):
        x = jnp.concatenate([arrays[i][f:e] for arrays, _, f, e in portions])
        rows.append(jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=jnp.nan))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out, state = gated_delta(*rows, *WEIGHTS, state, jnp.int32(1), batch, policy=policy)
    out = np.asarray(out.astype(jnp.float32))
    assert not out[count:].any()
    return out[:count], state


def close(x, y, bound=4e-3):
    assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y)


def test_prefill_in_portions_and_decode_agree_with_the_reference(monkeypatch):
    # As with more heads than are tested here; the gradient's test walks in narrow columns.
    monkeypatch.setattr(gated_delta_prefill, "walk_sizes", lambda columns: (64, 2))
    x, y = tokens(75, 1), tokens(70, 2)
    results = []
    for policy in (REFERENCE, MOSAIC):
        state, outs = dirty(policy), []
        # x: 62 tokens, then one past the chunk's end by decode, then the rest of it; y: at once.
        out, state = feed(policy, state, [(y, 0, 0, 70), (x, 2, 0, 62)])
        outs.append(out)
        for t in (62, 63, 64):
            out, state = feed(policy, state, [(x, 2, t, t + 1)], 1)
            outs.append(out)
        out, state = feed(policy, state, [(x, 2, 65, 75)])
        outs.append(out)
        results.append((outs, state))
    for mine, want in zip(results[1][0], results[0][0], strict=True):
        close(mine, want)
    whole, _ = feed(MOSAIC, dirty(MOSAIC), [(x, 1, 0, 75)])
    close(np.concatenate([results[1][0][0][70:], *results[1][0][1:]]), whole, 2e-3)
    for mine, want in zip(
        jax.tree.leaves(results[1][1]), jax.tree.leaves(results[0][1]), strict=True
    ):
        mine, want = (np.asarray(z.astype(jnp.float32)) for z in (mine, want))
        assert np.isnan(mine[0]).all() and np.isnan(mine[1, 1]).all()
        rows = slice(None) if mine.ndim == 5 and mine.shape[3] != C else slice(0, 6)
        close(mine[1, [0, 2]][:, :, rows], want[1, [0, 2]][:, :, rows])


def test_gradient_agrees_with_the_reference():
    width = 2 * K  # two warpgroups
    sequences = [tokens(75, 3, width), tokens(53, 4, width)]
    segments = [Segment([0] * len(x[0]), 0, [], i) for i, x in enumerate(sequences)]
    batch = build(segments, Bucket(136, 3, 4, 1, C), C)
    args = [jnp.concatenate(x) for x in zip(*sequences, strict=True)]
    args = [jnp.pad(x, [(0, 8)] + [(0, 0)] * (x.ndim - 1)) for x in args]
    weight = jnp.asarray(np.random.default_rng(5).normal(size=args[2].shape), jnp.float32)
    results = []
    for policy in (REFERENCE, MOSAIC):

        def loss(*x, policy=policy):
            out = gated_delta(*x, dirty(policy, width), jnp.int32(0), batch, policy=policy)[0]
            return jnp.sum(out.astype(jnp.float32) * weight)

        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            results.append(jax.grad(loss, tuple(range(7)))(*args, *WEIGHTS))
    for mine, want in zip(*reversed(results), strict=True):
        assert mine.dtype == want.dtype
        close(*(np.asarray(x.astype(jnp.float32)) for x in (mine, want)), 1e-2)


@pytest.mark.parametrize("heads", [(16, 32), (2, 4), (16, 48), (4, 4)])
@pytest.mark.parametrize("piece_rows", [C, 1])
def test_lowers_at_model_shapes(piece_rows, heads):
    key_heads, value_heads = heads
    count = 128 if piece_rows == C else 4
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    weights = [shape(value_heads, dtype=jnp.float32)] * 2
    rows = [shape(count, n, 128) for n in (key_heads, key_heads, value_heads)]
    gates = [shape(count, value_heads)] * 2
    bucket = Bucket(count, 4, 4, 1, piece_rows)
    batch = build([Segment([0], 70, [], 0)], bucket, C)
    state = jax.eval_shape(lambda: init_state(3, 4, *heads, 128, 128, MOSAIC))

    def call(*x):
        return gated_delta(*x, policy=MOSAIC)

    def gradient(*x):
        out, pull = jax.vjp(lambda *y: call(*y, *x[7:])[0], *x[:7])
        return pull(out)

    args = (*rows, *gates, *weights, state, shape(dtype=jnp.int32), batch)
    for function, kernels in ((call, 4 if piece_rows == 1 else 3), (gradient, 8)):
        if piece_rows == C or function is call:
            lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("custom_call @mosaic_gpu") == kernels


def test_arguments_are_checked():
    state = dirty(MOSAIC)
    with pytest.raises(ValueError, match="bfloat16"):
        feed(Policy(evaluation="mosaic", compute_dtype="float32"), state, [(tokens(3, 0), 0, 0, 3)])
