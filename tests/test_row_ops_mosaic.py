"""Row ops, Hopper evaluation: interpreted, against the reference; lowered at the 35B shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from isojax.batch import Bucket, Segment, build
from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.ops import elementwise
from isojax.ops.convolution import causal_convolution
from isojax.ops.embedding import embedding
from isojax.ops.gated_delta import _gates
from isojax.ops.norm import gated_rms_norm, rms_norm
from isojax.ops.rotary import rotary, rotary_table
from isojax.ops.router import router
from pallas_kernels.rows_gates import gates_backward
from tests.kernels import BF16, F32, error, f64, interpreted, lower_for_cuda, normal, vjp
from tests.util import ONE, assert_same_bits, whole_sequences

MOSAIC = Policy(evaluation="mosaic", batch_leaves=2)
REFERENCE = Policy(batch_leaves=2)
T = 6  # two leaves of three rows
POSITIONS = np.array([0, 1, 7, 1000, 3, 12], np.int32)
TABLE = rotary_table(POSITIONS, rotary_dim=64, theta=1e4)
NORM = {"epsilon": 1e-6, "zero_centered": True, "layout": ONE}
GATED = {"epsilon": 1e-6, "heads": 2, "layout": ONE}
X, Y, HEADS, GATE = (normal(i, *s) for i, s in enumerate([(T, 64), (T, 64), (T, 2, 96), (T, 1)]))

# name: (op with a keyword `policy`, operands by row, operands shared by all rows)
ROW_OPS = {
    "rms_norm": (partial(rms_norm, **NORM), (X,), (normal(5, 64),)),
    "rms_norm of heads": (partial(rms_norm, **NORM, heads=2), (HEADS,), (normal(5, 96),)),
    "gated_rms_norm": (partial(gated_rms_norm, **GATED), (HEADS, -HEADS), (normal(5, 96),)),
    "add": (elementwise.add, (X, Y), ()),
    "swiglu": (elementwise.swiglu, (X, Y), ()),
    "sigmoid_gate": (elementwise.sigmoid_gate, (X, Y), ()),
    "gated_add": (elementwise.gated_add, (X, Y, GATE), ()),
    "rotary": (rotary, (HEADS, *TABLE), ()),
}


@pytest.mark.parametrize("name", ROW_OPS)
def test_row_op(name):
    """Values and gradients; a row alone, rows in another order, beside a row of NaN: same bits."""
    op, rows, shared = ROW_OPS[name]

    def value_and_gradients(policy):
        out, pull = jax.vjp(partial(op, policy=policy), *rows, *shared)
        return out, *pull(normal(9, *out.shape))

    order = np.array([3, 0, 5, 1])
    with interpreted():
        got = value_and_gradients(MOSAIC)
        alone = op(*(x[2:3] for x in rows), *shared, policy=MOSAIC)
        moved = [jnp.concatenate([x[order], jnp.full_like(x[:1], jnp.nan)]) for x in rows]
        moved = op(*moved, *shared, policy=MOSAIC)
    assert_same_bits(alone[0], got[0][2])
    assert_same_bits(moved[:-1], got[0][order])
    for mine, want in zip(got, value_and_gradients(REFERENCE), strict=True):
        assert mine.dtype == want.dtype
        assert error(mine, f64(want)) < 5e-3 if np.any(want) else not np.any(mine)


def test_gates():
    """Heads that do not divide a line; decays down to the smallest."""
    a, b = 8 * normal(0, 5, 6), 8 * normal(1, 5, 6)
    weights = jnp.linspace(-6, 3, 6), jnp.linspace(-12, 3, 6)
    with interpreted():
        g, beta = _gates(MOSAIC, ONE, a, b, *weights)
        again = _gates(MOSAIC, ONE, a[3:4], b[3:4], *weights)
    assert_same_bits(again, (g[3:4], beta[3:4]))
    x = f64(a) + f64(weights[1])
    np.testing.assert_allclose(f64(g), -np.exp(f64(weights[0])) * np.logaddexp(x, 0), rtol=2e-6)
    np.testing.assert_allclose(f64(beta), 1 / (1 + np.exp(-f64(b))), rtol=1e-6)


def test_gates_gradient():
    a, b = 2 * normal(0, 5, 6), 2 * normal(1, 5, 6)
    weights = normal(2, 6, dtype=F32), normal(3, 6, dtype=F32)
    dg, dbeta = normal(4, 5, 6, dtype=F32), normal(5, 5, 6, dtype=F32)

    def formula(a, b, A_log, dt_bias):
        g = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)
        return jnp.sum(g * f64(dg) + jax.nn.sigmoid(b) * f64(dbeta))

    with interpreted():
        da, db, *terms = gates_backward(a, b, *weights, dg, dbeta)
    want = vjp(formula, [a, b, *weights], np.float64(1))
    for mine, expected in zip((da, db, *(t.sum(0) for t in terms)), want, strict=True):
        assert error(mine, expected) < 5e-3


def convolve(policy, x, taps, state, batch):
    """Of channels side by side, as many in a group as it has taps."""
    cut = np.cumsum([w.shape[0] for w in taps])[:-1]
    xs = tuple(jnp.split(x, cut, axis=1))
    outs, state = causal_convolution(
        xs, taps, state, jnp.int32(1), batch, policy=policy, layout=ONE
    )
    return jnp.concatenate(outs, axis=1), state


def test_convolution_in_portions():
    """Prefill and decode give the bits of the whole sequence; the state moves alike."""
    tokens, taps = normal(0, 9, 384), (normal(1, 128, 4), normal(2, 256, 4))
    other = normal(3, 4, 384)

    def feed(policy, state, portions, rows, piece_rows=64):
        batch = build(
            [Segment([0] * len(x), first, [], slot) for x, first, slot in portions],
            Bucket(rows, 3, 3, 1, piece_rows),
            64,
        )
        x = jnp.concatenate([x for x, _, _ in portions])
        stale = jnp.full((rows - len(x), 384), jnp.nan, BF16)
        out, state = convolve(policy, jnp.concatenate([x, stale]), taps, state, batch)
        assert not np.any(out[len(x) :])
        return out[: len(x)], state

    results = []
    for policy in (REFERENCE, MOSAIC):
        state = jnp.full((2, 3, 3, 384), jnp.nan, BF16)
        with interpreted():
            both, state = feed(policy, state, [(other, 0, 2), (tokens[:2], 0, 0)], 8)
            steps = [(tokens[2:3], 2, 0), (other[:1], 0, 1)]
            one, state = feed(policy, state, steps, 3, piece_rows=1)
            rest, state = feed(policy, state, [(tokens[3:], 3, 0), (other, 0, 1)], 12)
            whole, _ = feed(policy, state, [(tokens, 0, 1)], 9)
        assert_same_bits(jnp.concatenate([both[4:], one[:1], rest[:6]]), whole)
        assert_same_bits(one[1:], both[:1])
        assert_same_bits(rest[6:], both[:4])
        results.append((whole, state))
    assert error(results[1][0], f64(results[0][0])) < 5e-3
    assert_same_bits(results[1][1], results[0][1])


def test_convolution_gradient():
    batch = whole_sequences([5, 4, 8], tokens=20)
    stale = jnp.arange(20)[:, None] >= 17
    x = jnp.where(stale, jnp.nan, normal(0, 20, 384))
    dout = jnp.where(stale, jnp.nan, normal(1, 20, 384))
    taps = normal(2, 128, 4), normal(3, 256, 4)
    state = jnp.full((2, 3, 3, 384), jnp.nan, BF16)
    results = []
    for policy in (REFERENCE, MOSAIC):
        with interpreted():
            op = lambda *a, policy=policy: convolve(policy, *a, state, batch)[0]  # noqa: E731
            results.append(jax.tree.leaves(jax.vjp(op, x, taps)[1](dout)))
    for mine, want in zip(*reversed(results), strict=True):
        assert error(mine, f64(want)) < 5e-3


@pytest.mark.parametrize("top_k, normalise", [(3, True), (4, False)])
def test_router(top_k, normalise):
    x, w, dout = normal(0, T, 64), normal(1, 64, 32) / 8, normal(2, T, top_k, dtype=F32)
    results = []
    for policy in (REFERENCE, MOSAIC):

        def weigh(x, w, policy=policy):
            return router(x, w, top_k=top_k, normalise=normalise, policy=policy, layout=ONE)

        with interpreted():
            weights, pull, chosen = jax.vjp(weigh, x, w, has_aux=True)
            results.append((weights, *pull(dout)))
            if policy is MOSAIC:
                assert_same_bits(weigh(x[3:4], w), (weights[3:4], chosen[3:4]))
    for mine, want in zip(*reversed(results), strict=True):
        assert error(mine, f64(want)) < 5e-3


def test_gradients_on_a_mesh():
    """Ranks that own some leaves of rows, or of the table, end at one rank's bits."""
    tokens = np.array([3, 1, 3, 0, 7, 3, 2, 2], np.int32)
    table, w, dout = normal(0, 8, 128), normal(1, 128), normal(2, 8, 128)
    policy = Policy(evaluation="mosaic", batch_leaves=4)

    def gradients(layout):
        def rank(tokens, table, w, dout):
            def f(table, w):
                x = embedding(tokens, table, policy=policy, layout=layout)
                return rms_norm(x, w, **NORM | {"policy": policy, "layout": layout})

            dtable, dw = jax.vjp(f, table.astype(F32), w.astype(F32))[1](dout.astype(F32))
            return dtable[None], dw[None]

        specs = P("data"), P("model"), P(), P("data")
        body = jax.shard_map(
            rank, mesh=layout.mesh(), in_specs=specs, out_specs=(P("data", "model"), P("data")),
            check_vma=False,
        )  # fmt: skip
        with interpreted():
            return [x.reshape(layout.data, *x.shape[1:]) for x in body(tokens, table, w, dout)]

    one = gradients(Layout())
    for layout in (Layout(data=2), Layout(model=2)):
        for mine, want in zip(gradients(layout), one, strict=True):
            mine = mine[0] + mine[1] if layout.data == 2 else mine[0]
            assert_same_bits(mine, want[0])


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match='16 elements.*multiple of 32.*"reference"'):
        rms_norm(normal(0, 4, 16), normal(1, 16), **NORM, policy=MOSAIC)
    with pytest.raises(ValueError, match='multiple of 32.*"reference"'):
        rotary(HEADS, *(x[:, :4] for x in TABLE), policy=MOSAIC)
    with pytest.raises(ValueError, match='multiple of 128.*"reference"'):
        take = partial(embedding, np.zeros(4, np.int32), policy=MOSAIC, layout=ONE)
        jax.grad(lambda table: take(table).sum())(jnp.ones((8, 64)))


def shape(*sizes, dtype=BF16):
    return sizes, dtype


# name: (op, operands of `count` rows, shared operands, kernels of the value, with the gradient)
MODEL = {
    "rms_norm": (partial(rms_norm, **NORM), [(2048,)], [shape(2048)], 1, 4),
    "q_norm": (partial(rms_norm, **NORM, heads=16), [(16, 256)], [shape(256)], 1, 4),
    "gated_rms_norm": (
        partial(gated_rms_norm, **GATED | {"heads": 32}),
        [(32, 128)] * 2, [shape(128, dtype=F32)], 1, 4,
    ),
    "add": (elementwise.add, [(2048,)] * 2, [], 1, 1),
    "swiglu": (elementwise.swiglu, [(512,)] * 2, [], 1, 2),
    "sigmoid_gate": (elementwise.sigmoid_gate, [(4096,)] * 2, [], 1, 2),
    "gated_add": (elementwise.gated_add, [(2048,), (2048,), (1,)], [], 1, 2),
    "rotary": (
        lambda x, p, policy: rotary(
            x, *rotary_table(p[:, 0].astype(jnp.int32), rotary_dim=64, theta=1e7), policy=policy
        ),
        [(16, 256), (1,)], [], 1, 2,
    ),
    "router": (
        lambda x, w, policy: router(
            x, w, top_k=8, normalise=True, policy=policy, layout=ONE
        )[0],
        [(2048,)], [shape(2048, 256)], 2, 5,
    ),
    "router, all": (
        lambda x, w, policy: router(
            x, w, top_k=8, normalise=False, policy=policy, layout=ONE
        )[0],
        [(2048,)], [shape(2048, 256)], 2, 6,
    ),
    "embedding": (
        lambda x, w, policy: embedding(
            x[:, 0].astype(jnp.int32), w, policy=policy, layout=ONE
        ),
        [(1,)], [shape(248320, 2048)], 0, 1,
    ),
    "gates, backward": (
        lambda a, b, dg, dbeta, A, d, policy: jnp.stack(gates_backward(a, b, A, d, dg, dbeta)[2:]),
        [(32,)] * 4, [shape(32, dtype=F32)] * 2, 1, None,
    ),
    "gates": (
        lambda a, b, A, d, policy: jnp.stack(_gates(policy, ONE, a, b, A, d)),
        [(32,)] * 2, [shape(32, dtype=F32)] * 2, 1, None,
    ),
}  # fmt: skip


def kernels(function, *operands):
    return lower_for_cuda(function, *operands).count("custom_call @mosaic_gpu")


@pytest.mark.parametrize("name", MODEL)
def test_lowers_at_model_shapes(name):
    op, rows, shared, forward, both = MODEL[name]
    op = partial(op, policy=Policy(evaluation="mosaic"))

    def gradient(*operands):
        out, pull = jax.vjp(op, *operands)
        return pull(out)

    for count in (1, 1280):
        operands = [shape(count, *x) for x in rows] + shared
        assert kernels(op, *operands) == forward
    if both is not None:
        assert kernels(gradient, *operands) == both


@pytest.mark.parametrize("channels", [8192, 1024])
def test_convolution_lowers_at_model_shapes(channels):
    batch, policy = whole_sequences([1000, 280]), Policy(evaluation="mosaic")

    def gradient(x, w, state):
        out, pull = jax.vjp(lambda *a: convolve(policy, *a, state, batch)[0], x, (w,))
        return pull(out)

    operands = shape(1280, channels), shape(channels, 4), shape(2, 2, 3, channels)
    assert kernels(lambda x, w, s: convolve(policy, x, (w,), s, batch), *operands) == 1
    assert kernels(gradient, *operands) == 3
