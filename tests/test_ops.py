"""Every op's value and gradient against a plain float64 formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.numerics.trees import leaf_dot, pair_sum, token_sum, tree_dot, tree_sum
from isojax.ops import elementwise as ops
from isojax.ops.attention import attention
from isojax.ops.convolution import causal_convolution
from isojax.ops.embedding import embedding
from isojax.ops.experts import experts
from isojax.ops.linear import columns, rows
from isojax.ops.logprob import linear_logprob, logits_logprob, scaled_logits
from isojax.ops.norm import gated_rms_norm, rms_norm
from isojax.ops.rotary import rotary, rotary_table
from isojax.ops.router import router
from tests.util import EXACT, ONE, assert_same_bits, whole_sequences

OPS = {"policy": EXACT, "layout": ONE}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(op, plain, *inputs, tolerance: float = 2e-5) -> None:
    """Value and gradient of op(*inputs) against plain(*inputs) in float64."""
    out = jax.jit(op)(*inputs)
    seeds = [normal(i + 99, *o.shape) for i, o in enumerate(jax.tree.leaves(out))]

    def pulled(f):
        def loss(*xs):
            outs = jax.tree.leaves(f(*xs))
            return sum(jnp.sum(o * s) for o, s in zip(outs, seeds, strict=True))

        return jax.grad(loss, argnums=tuple(range(len(inputs))))

    got = jax.jit(pulled(op))(*inputs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in inputs]
        want_out, want = plain(*wide), pulled(plain)(*wide)
    for g, w in zip(jax.tree.leaves((out, got)), jax.tree.leaves((want_out, want)), strict=True):
        scale = np.abs(np.asarray(w)).max() + 1e-30
        assert np.abs(np.asarray(g, np.float64) - np.asarray(w)).max() <= tolerance * scale


@pytest.mark.parametrize("k", [1, 15, 16, 17, 40, 64])
def test_tree_dot(k):
    a, b = normal(0, 3, 5, k), normal(1, 3, k, 7)
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(tree_dot(a, b), want, rtol=1e-5, atol=1e-5)


def test_tree_dot_is_the_tree_it_names():
    a, b = normal(0, 1, 48), normal(1, 48, 1)
    p = (a[0] * b[:, 0]).astype(np.float32)
    total = np.float32(0)
    for step in p.reshape(3, 16):
        while len(step) > 1:
            step = step[: len(step) // 2] + step[len(step) // 2 :]
        total = np.float32(total + step[0])
    assert_same_bits(tree_dot(a, b)[0, 0], total)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 100])
def test_sums(n):
    x = normal(0, n, 3)
    for value in (tree_sum(x, axis=0), pair_sum(x)):
        np.testing.assert_allclose(value, x.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_pair_sum_subtrees_finish_on_any_number_of_ranks():
    x = normal(0, 8, 5) * 1e3
    whole = pair_sum(x)
    for ranks in (2, 4, 8):
        shares = jnp.stack([pair_sum(part) for part in x.reshape(ranks, 8 // ranks, 5)])
        assert_same_bits(pair_sum(shares), whole)


def test_leaf_dot_and_token_sum():
    a, b = normal(0, 6, 64), normal(1, 64, 5)
    np.testing.assert_allclose(leaf_dot(a, b, 8), a @ b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(token_sum(b, 4), b.sum(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="equal leaves"):
        leaf_dot(a, b, 7)


def test_columns():
    x, w, u = normal(0, 16, 24), normal(1, 24, 16), normal(2, 24, 8)
    check(lambda x, w, u: columns(x, (w, u), **OPS), lambda x, w, u: (x @ w, x @ u), x, w, u)


def test_rows():
    check(lambda x, w: rows(x, w, **OPS), lambda x, w: x @ w, normal(0, 16, 24), normal(1, 24, 8))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered):
    def plain(x, w):
        n = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return n * (w + zero_centered)

    options = {"epsilon": 1e-6, "zero_centered": zero_centered, **OPS}
    check(lambda x, w: rms_norm(x, w, **options), plain, normal(0, 8, 20), normal(1, 20))
    heads = lambda x, w: rms_norm(x, w, heads=6, **options)  # noqa: E731
    check(heads, plain, normal(0, 8, 6, 10), normal(1, 10))


def test_gated_rms_norm():
    def plain(x, z, w):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w * jax.nn.silu(z)

    op = lambda x, z, w: gated_rms_norm(x, z, w, epsilon=1e-6, heads=4, **OPS)  # noqa: E731
    check(op, plain, normal(0, 8, 4, 10), normal(1, 8, 4, 10), normal(2, 10))


def test_elementwise():
    x, y, g = normal(0, 8, 10), normal(1, 8, 10), normal(2, 8, 1)
    add, swiglu, sigmoid_gate, gated_add = (
        partial(f, policy=EXACT) for f in (ops.add, ops.swiglu, ops.sigmoid_gate, ops.gated_add)
    )
    check(add, lambda x, y: x + y, x, y)
    check(swiglu, lambda x, y: jax.nn.silu(x) * y, x, y)
    check(sigmoid_gate, lambda x, y: x * jax.nn.sigmoid(y), x, y)
    check(gated_add, lambda x, y, g: x + y * jax.nn.sigmoid(g), x, y, g)


def test_rotary():
    positions = np.array([0, 1, 5, 1000], np.int32)

    def table(rotary_dim=8, theta=1e4):
        frequency = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
        angle = positions[:, None] * frequency
        return np.cos(angle)[:, None], np.sin(angle)[:, None]

    def plain(x):
        c, s = table()
        a, b = x[..., :4], x[..., 4:8]
        return jnp.concatenate([a * c - b * s, b * c + a * s, x[..., 8:]], -1)

    def op(x):
        return rotary(x, *rotary_table(positions, rotary_dim=8, theta=1e4), policy=EXACT)

    check(op, plain, normal(0, 4, 3, 12), tolerance=1e-4)


def test_embedding():
    tokens = np.array([3, 1, 3, 0, 7, 3, 2, 2], np.int32)
    check(lambda t: embedding(tokens, t, **OPS), lambda t: t[tokens], normal(0, 9, 6))


@pytest.mark.parametrize("lengths", [[8], [1, 7], [70, 2, 56], [64, 64], [129, 7]])
def test_attention(lengths):
    batch = whole_sequences(lengths)
    tokens = sum(lengths)
    q, k, v = normal(0, tokens, 4, 8), normal(1, tokens, 2, 8), normal(2, tokens, 2, 8)
    pages = int(batch.page_table.max()) + 1
    pool = np.full((1, pages, 64, 2, 8), np.nan, np.float32)

    def op(q, k, v):
        return attention(q, k, v, pool, pool, jnp.int32(0), batch, kv_heads=2, **OPS)[0]

    def plain(q, k, v):
        seq = np.repeat(np.arange(len(lengths)), lengths)
        seen = (seq[:, None] == seq) & (np.arange(tokens)[:, None] >= np.arange(tokens))
        s = jnp.einsum("thd,uhd->htu", q, jnp.repeat(k, 2, 1)) / 8**0.5
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
        return jnp.einsum("htu,uhd->thd", p, jnp.repeat(v, 2, 1))

    check(op, plain, q, k, v)


@pytest.mark.parametrize("lengths", [[8], [1, 2, 5], [3, 5]])
def test_convolution(lengths):
    batch = whole_sequences(lengths)
    tokens = sum(lengths)
    state = np.full((1, len(lengths), 3, 6), np.nan, np.float32)

    def op(x, w):
        return causal_convolution((x,), (w,), state, jnp.int32(0), batch, **OPS)[0][0]

    def plain(x, w):
        outs, row = [], 0
        for n in lengths:
            padded = jnp.concatenate([jnp.zeros((3, 6)), x[row : row + n]])
            outs.append(sum(padded[i : i + n] * w[:, i] for i in range(4)))
            row += n
        return jax.nn.silu(jnp.concatenate(outs))

    check(op, plain, normal(0, tokens, 6), normal(1, 6, 4))


@pytest.mark.parametrize("normalise", [True, False])
def test_router(normalise):
    def plain(x, w):
        p = jax.nn.softmax(x @ w)
        top = jax.lax.top_k(p, 3)[0]
        return top / top.sum(-1, keepdims=True) if normalise else top

    op = lambda x, w: router(x, w, top_k=3, normalise=normalise, **OPS)[0]  # noqa: E731
    check(op, plain, normal(0, 16, 12), normal(1, 12, 8))


def test_router_ties_go_to_the_lowest_expert():
    x = np.ones((2, 4), np.float32)
    _, chosen = router(x, np.ones((4, 6), np.float32), top_k=3, normalise=True, **OPS)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("routing", ["random", "all to one", "one unused"])
def test_experts(routing):
    random = np.random.default_rng(0)
    tokens, count = 24, 4
    chosen = np.stack([random.permutation(count)[:2] for _ in range(tokens)]).astype(np.int32)
    if routing == "all to one":
        chosen[:] = [3, 1]
    if routing == "one unused":
        chosen = np.where(chosen == 2, (chosen[:, ::-1] + 1) % 4, chosen)
        chosen = np.where(chosen == 2, 0, chosen).astype(np.int32)
    weights = np.abs(normal(1, tokens, 2))

    def plain(x, weights, g, u, d):
        hidden = jax.nn.silu(jnp.einsum("th,ehi->tei", x, g)) * jnp.einsum("th,ehi->tei", x, u)
        y = jnp.einsum("tei,eih->teh", hidden, d)
        return (y[np.arange(tokens)[:, None], chosen] * weights[..., None]).sum(1)

    op = lambda x, weights, g, u, d: experts(x, weights, chosen, g, u, d, **OPS)  # noqa: E731
    shapes = [normal(2, count, 12, 20), normal(3, count, 12, 20), normal(4, count, 20, 12)]
    check(op, plain, normal(0, tokens, 12), weights, *shapes)


@pytest.mark.parametrize("vocab", [40, 1000, 4096 + 64])
def test_linear_logprob(vocab):
    tokens, width = 16, 12
    targets = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    inverse = np.linspace(0.5, 2, tokens).astype(np.float32)
    x, w = normal(1, tokens, width), normal(2, width, vocab)
    z = (x @ w) * inverse[:, None]
    threshold = np.minimum(np.median(z, axis=1), z[np.arange(tokens), targets]).astype(np.float32)
    threshold[::4] = -np.inf

    def plain(x, w):
        z = (x @ w) * inverse[:, None]
        hit = z[np.arange(tokens), targets]
        kept = jnp.where(z >= threshold[:, None] - 1e-4, z, -jnp.inf)
        return hit - jax.nn.logsumexp(z, -1), hit - jax.nn.logsumexp(kept, -1)

    def op(x, w):
        return linear_logprob(x, w, targets, inverse, threshold - np.float32(1e-4), **OPS)

    check(op, plain, x, w)
    logits = jax.jit(lambda x, w: scaled_logits(x, w, inverse, **OPS))(x, w)
    again = logits_logprob(logits, targets, threshold - np.float32(1e-4), policy=EXACT)
    assert_same_bits(again, jax.jit(op)(x, w))
