"""The gated delta rule's reference evaluation: its meaning, its bits and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.batch import Bucket, Segment, build
from isojax.numerics.policy import Policy
from isojax.ops.gated_delta import gated_delta, init_state

HK, HV, K, V, C = 2, 4, 16, 24, 8
BF16 = Policy(chunk=C)
F32 = Policy(chunk=C, compute_dtype="float32")
LENGTHS = (21, 8, 1, 16, 3)


def tokens(length, seed, dtype):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(length, *shape)), dtype)  # noqa: E731
    q, k, v = draw(HK, K), draw(HK, K), draw(HV, V)
    if length > 4:
        k = k.at[length // 2].set(0)
    return q, k, v, draw(HV), draw(HV)


def weights():
    rng = np.random.default_rng(99)
    return jnp.asarray(rng.normal(size=HV), jnp.float32), jnp.ones(HV, jnp.float32)


class Cached:
    """Sequences that live in slots of a dirty state, fed in any portions."""

    def __init__(self, policy, slots=7, layers=2):
        self.policy = policy
        state = init_state(layers, slots, HK, HV, K, V, policy)
        self.state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)

    def feed(self, portions, piece_rows=C):
        """portions: (sequence arrays, slot, first, end) in row order -> outputs of each."""
        count = sum(end - first for _, _, first, end in portions)
        bucket = Bucket(56, 6, 15, 1, C) if piece_rows == C else Bucket(5, 3, 4, 1, 1)
        pad = bucket.tokens - count
        segments = [Segment([0] * (e - f), f, [], slot) for _, slot, f, e in portions]
        batch = build(segments, bucket, C)
        rows = []
        for i in range(5):
            parts = [arrays[i][f:e] for arrays, _, f, e in portions]
            parts.append(jnp.full((pad, *parts[0].shape[1:]), jnp.nan, parts[0].dtype))
            rows.append(jnp.concatenate(parts))
        layer = jnp.int32(1)
        out, self.state = gated_delta(
            *rows, *weights(), self.state, layer, batch, policy=self.policy
        )
        assert not np.asarray(out[count:]).astype(np.float32).any()
        edges = np.cumsum([e - f for _, _, f, e in portions])[:-1]
        return np.split(np.asarray(out[:count]), edges)


def recurrence(q, k, v, a, b):
    """Float64, one token after the other, as transformers writes it."""
    A_log, dt_bias = (np.asarray(x, np.float64) for x in weights())
    q, k, v, a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, a, b))
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (np.repeat(unit(x), HV // HK, axis=1) for x in (q, k))
    g, beta = -np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), 1 / (1 + np.exp(-b))
    state, out = np.zeros((HV, K, V)), []
    for t in range(len(q)):
        state = state * np.exp(g[t])[:, None, None]
        delta = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(np.einsum("hkv,hk->hv", state, q[t] * K**-0.5))
    return np.stack(out)


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.int16, 4: np.int32}[x.dtype.itemsize])


@pytest.mark.parametrize(("policy", "bound"), [(F32, 2e-6), (BF16, 1e-2)])
def test_equals_the_token_recurrence(policy, bound):
    sequences = [tokens(n, i, policy.dtype) for i, n in enumerate(LENGTHS)]
    portions = [(x, slot, 0, len(x[0])) for slot, x in enumerate(sequences)]
    for x, out in zip(sequences, Cached(policy).feed(portions), strict=True):
        expected = recurrence(*x)
        error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
        assert error < bound


@pytest.mark.parametrize("policy", [BF16, F32], ids=["bfloat16", "float32"])
def test_every_split_and_decode_give_the_same_bits(policy):
    length = 19
    x, y = tokens(length, 1, policy.dtype), tokens(40, 2, policy.dtype)
    whole = bits(Cached(policy).feed([(x, 0, 0, length)])[0])
    for split in range(1, length):
        cached = Cached(policy)
        first = cached.feed([(y, 1, 0, 20 - split), (x, 3, 0, split)])[1]
        # The rest in one piece, or token by token beside another sequence.
        rest = []
        if split % 2:
            rest.append(cached.feed([(x, 3, split, length)])[0])
        else:
            for t in range(split, length):
                at = 20 - 2 * split + t
                rest.append(cached.feed([(y, 1, at, at + 1), (x, 3, t, t + 1)], 1)[1])
        assert np.array_equal(whole, bits(np.concatenate([first, *rest]))), split


def test_decode_equals_training_for_every_position():
    x = tokens(26, 5, jnp.bfloat16)
    whole = bits(Cached(BF16).feed([(x, 0, 0, 26)])[0])
    cached = Cached(BF16)
    rows = [cached.feed([(x, 2, t, t + 1)], 1 if t % 3 else C)[0] for t in range(26)]
    assert np.array_equal(whole, bits(np.concatenate(rows)))


def test_other_slots_and_layers_are_left_alone():
    cached = Cached(BF16)
    x = tokens(11, 6, jnp.bfloat16)
    before = jax.tree.map(np.asarray, cached.state)
    cached.feed([(x, 2, 0, 11)])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cached.state), strict=True):
        new = np.asarray(new)
        assert np.isnan(new[0].astype(np.float32)).all()
        kept = [s for s in range(7) if s != 2]
        assert np.array_equal(bits(old[1, kept]), bits(new[1, kept]))
        assert np.isfinite(new[1, 2].astype(np.float32)).all()


def loss_of(function):
    return lambda *args: jnp.sum(jnp.sin(function(*args).astype(jnp.float32) * 3))


def jax_recurrence(q, k, v, a, b, A_log, dt_bias, starts):
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (jnp.repeat(unit(x), HV // HK, axis=1) for x in (q, k))
    g, beta = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)

    def step(state, x):
        q, k, v, g, beta, start = x
        state = jnp.where(start, 0, state) * jnp.exp(g)[:, None, None]
        delta = (v - jnp.einsum("hkv,hk->hv", state, k)) * beta[:, None]
        state = state + k[:, :, None] * delta[:, None, :]
        return state, jnp.einsum("hkv,hk->hv", state, q * K**-0.5)

    return jax.lax.scan(step, jnp.zeros((HV, K, V)), (q, k, v, g, beta, starts))[1]


def test_gradient_equals_that_of_the_recurrence():
    sequences = [tokens(n, i, jnp.float32) for i, n in enumerate((21, 8, 3))]
    segments = [Segment([0] * len(x[0]), 0, [], i) for i, x in enumerate(sequences)]
    batch = build(segments, Bucket(32, 3, 6, 1, C), C)
    state = init_state(1, 3, HK, HV, K, V, F32)
    args = [jnp.concatenate(x) for x in zip(*sequences, strict=True)]
    starts = jnp.asarray(batch.positions == 0)
    ours = loss_of(lambda *x: gated_delta(*x, state, jnp.int32(0), batch, policy=F32)[0])
    theirs = loss_of(lambda *x: jax_recurrence(*x, starts))
    argnums = tuple(range(7))
    for mine, want in zip(
        jax.grad(ours, argnums)(*args, *weights()),
        jax.grad(theirs, argnums)(*args, *weights()),
        strict=True,
    ):
        assert mine.dtype == want.dtype and mine.shape == want.shape
        assert np.linalg.norm(mine - want) < 3e-5 * np.linalg.norm(want)


def test_gradient_rows_do_not_depend_on_the_batch():
    x, y = tokens(21, 1, jnp.bfloat16), tokens(9, 2, jnp.bfloat16)

    def gradient(sequences, bucket):
        segments = [Segment([0] * len(s[0]), 0, [], i) for i, s in enumerate(sequences)]
        batch = build(segments, bucket, C)
        args = [jnp.concatenate(s) for s in zip(*sequences, strict=True)]
        pad = bucket.tokens - len(args[0])
        widths = [[(0, pad)] + [(0, 0)] * (s.ndim - 1) for s in args]
        args = [jnp.pad(*s, constant_values=jnp.nan) for s in zip(args, widths, strict=True)]
        state = init_state(1, 2, HK, HV, K, V, BF16)
        f = loss_of(lambda *s: gated_delta(*s, state, 0, batch, policy=BF16)[0])
        return jax.grad(f, tuple(range(7)))(*args, *weights())

    alone = gradient([x], Bucket(24, 1, 3, 1, C))
    beside = gradient([y, x], Bucket(40, 4, 9, 1, C))
    for one, two in zip(alone[:5], beside[:5], strict=True):
        assert np.array_equal(bits(one[:21]), bits(two[9:30]))
    assert all(np.isfinite(x).all() for x in alone[5:])


def test_arguments_are_checked():
    x = tokens(4, 0, jnp.bfloat16)
    batch = build([Segment([0] * 4, 0, [], 0)], Bucket(4, 1, 1, 1, C), C)
    state = init_state(1, 1, HK, HV, K, V, BF16)
    with pytest.raises(ValueError, match="piece_rows"):
        gated_delta(*x, *weights(), state, 0, dataclasses.replace(batch, piece_rows=3), policy=BF16)
    with pytest.raises(ValueError, match="evenly"):
        odd = (x[0], x[1], x[2][:, :3], *x[3:])
        gated_delta(*odd, *weights(), state, 0, batch, policy=BF16)
