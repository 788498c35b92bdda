"""Row ops: forward and backward against float64 in the interpreter, lowering at real shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rows_convolution
from pallas_kernels.rows_convolution import (
    convolution,
    convolution_backward,
    convolution_step,
)
from pallas_kernels.rows_elementwise import (
    add,
    gated_add,
    gated_add_backward,
    sigmoid_gate,
    sigmoid_gate_backward,
    swiglu,
    swiglu_backward,
)
from pallas_kernels.rows_embedding import embedding_gradient
from pallas_kernels.rows_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    l2_norm,
    l2_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from pallas_kernels.rows_rotary import rotary
from pallas_kernels.rows_routing import combine_slots, slot_dots, take_rows
from pallas_kernels.rows_softmax import (
    softmax,
    softmax_backward,
    softmax_chosen,
    softmax_chosen_backward,
)
from pallas_kernels.rows_token_sum import token_sum
from tests.kernels import (
    BF16,
    F32,
    I32,
    calls_mosaic,
    error,
    f64,
    interpreted,
    normal,
    same_bits,
    vjp,
)

EPSILON = 1e-6
ROWS, WIDTH = 6, 128  # not a whole number of blocks
X, Z, DY, W = (
    normal(0, ROWS, WIDTH),
    normal(1, ROWS, WIDTH),
    normal(2, ROWS, WIDTH),
    normal(3, WIDTH),
)
GATE = normal(4, ROWS)
P, DP = normal(5, ROWS, WIDTH, dtype=F32), normal(6, ROWS, WIDTH, dtype=F32)


def rms(x):
    return x * jax.lax.rsqrt((x * x).mean(1, keepdims=True) + EPSILON)


def summed(terms):
    return terms.sum(0)


def same(x):
    return x


# name: (formula, operands, kernel, backward kernel, what makes a gradient of each of its results)
NORM = dict(epsilon=EPSILON, zero_centered=True)
FORMULAS = {
    "rms_norm": (
        lambda x, w: rms(x) * (1 + w),
        (X, W),
        functools.partial(rms_norm, **NORM),
        lambda x, w, dy: rms_norm_backward(x, w, dy, **NORM),
        (same, summed),
    ),
    "gated_rms_norm": (
        lambda x, z, w: rms(x) * w * jax.nn.silu(z),
        (X, Z, W),
        functools.partial(gated_rms_norm, epsilon=EPSILON),
        functools.partial(gated_rms_norm_backward, epsilon=EPSILON),
        (same, same, summed),
    ),
    "l2_norm": (
        lambda x: x * jax.lax.rsqrt((x * x).sum(1, keepdims=True) + EPSILON),
        (X,),
        functools.partial(l2_norm, epsilon=EPSILON),
        lambda x, dy: (l2_norm_backward(x, dy, epsilon=EPSILON),),
        (same,),
    ),
    "add": (lambda x, y: x + y, (X, Z), add, lambda x, y, dy: (dy, dy), (same, same)),
    "swiglu": (
        lambda g, u: jax.nn.silu(g) * u,
        (X, Z),
        swiglu,
        swiglu_backward,
        (same, same),
    ),
    "sigmoid_gate": (
        lambda x, g: x * jax.nn.sigmoid(g),
        (X, Z),
        sigmoid_gate,
        sigmoid_gate_backward,
        (same, same),
    ),
    "gated_add": (
        lambda x, y, g: x + y * jax.nn.sigmoid(g)[:, None],
        (X, Z, GATE),
        gated_add,
        lambda x, y, g, dy: (dy, *gated_add_backward(y, g, dy)),
        (same, same, same),
    ),
    "softmax": (
        jax.nn.softmax,
        (P,),
        softmax,
        lambda z, dp: (softmax_backward(jax.nn.softmax(z), dp.astype(F32)),),
        (same,),
    ),
    "softmax_chosen": (
        jax.nn.softmax,
        (P[:, :8],),
        softmax_chosen,
        lambda z, dp: (softmax_chosen_backward(jax.nn.softmax(z), dp[:, :8].astype(F32)),),
        (same,),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_forward(name):
    formula, operands, kernel, _, _ = FORMULAS[name]
    with interpreted():
        out = kernel(*operands)
    with jax.enable_x64(True):
        expected = np.asarray(formula(*(jnp.asarray(f64(a)) for a in operands)))
    assert error(out, expected) < 3e-3


@pytest.mark.parametrize("name", FORMULAS)
def test_backward(name):
    formula, operands, _, backward, finish = FORMULAS[name]
    with interpreted():
        results = backward(*operands, DY)
    gradients = vjp(formula, list(operands), f64(DY)[:, : operands[0].shape[1]])
    for result, make, gradient in zip(results, finish, gradients, strict=True):
        assert error(make(result), gradient) < 3e-3


def test_sigmoid_and_silu_to_float32():
    x = jnp.asarray(np.linspace(-80, 80, 1 << 14), F32)
    one = jnp.ones_like(x)
    with interpreted():
        results = sigmoid_gate(one, x), swiglu(x, one)
    expected = 1 / (1 + np.exp(-f64(x)))
    for result, value in zip(results, (expected, f64(x) * expected), strict=True):
        error = np.abs(f64(result) / value - 1)
        assert error.max() < 5e-6 and error[np.abs(x) < 8].max() < 8e-7


def test_sigmoid_at_its_limits():
    x = jnp.asarray([-jnp.inf, -100, 100, jnp.inf, jnp.nan, jnp.nan, 89, 1000] * 4, F32)
    with interpreted():
        out = np.asarray(sigmoid_gate(jnp.ones_like(x), x))[:8]
    assert 0 <= out[1] < 1e-37
    assert np.array_equal(out, [0, out[1], 1, 1, np.nan, np.nan, 1, 1], equal_nan=True)


def test_rows_wider_than_a_warp():
    x, w = normal(0, 2, 4096), normal(1, 4096)
    with interpreted():
        out = rms_norm(x, w, epsilon=EPSILON, zero_centered=False)
    y = f64(x)
    expected = y / np.sqrt((y * y).mean(1, keepdims=True) + EPSILON) * f64(w)
    assert error(out, expected) < 3e-3


def test_widths_that_do_not_fit():
    with pytest.raises(ValueError, match="multiple of 32"):
        l2_norm(normal(0, 4, 40), epsilon=EPSILON)


def test_rotary_turns_pairs_and_its_inverse_turns_back():
    x = normal(0, 5, 3, 128, dtype=F32)
    angle = np.random.default_rng(1).standard_normal((5, 32))
    cosine, sine = jnp.asarray(np.cos(angle), F32), jnp.asarray(np.sin(angle), F32)
    with interpreted():
        out = rotary(x, cosine, sine)
        back = rotary(out, cosine, -sine)
    a, b = f64(x)[..., :32], f64(x)[..., 32:64]
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    expected = np.concatenate([a * c - b * s, b * c + a * s, f64(x)[..., 64:]], -1)
    assert error(out, expected) < 1e-6 and error(back, f64(x)) < 1e-6


def test_token_sum_over_ragged_blocks():
    x = normal(0, 2 * 70, 130, dtype=F32)
    with interpreted():
        out = token_sum(x, 2)
    assert error(out, f64(x).reshape(2, 70, 130).sum(1)) < 1e-6


def test_convolution_reads_rows_state_and_nothing():
    x, w, state = normal(0, 3, 128), normal(1, 128, 4), normal(2, 6, 128)
    # A sequence with two cached inputs at state rows 4 and 5; then the start of another.
    source = jnp.asarray([[-1, -6, -7, 0], [-6, -7, 0, 1], [-1, -1, -1, 2]], I32)
    with interpreted():
        out = convolution(x, w, state, source)
    xs, ss, zero = f64(x), f64(state), np.zeros(128)
    windows = [[zero, ss[4], ss[5], xs[0]], [ss[4], ss[5], xs[0], xs[1]], [zero] * 3 + [xs[2]]]
    z = (np.asarray(windows) * f64(w).T).sum(1)
    assert error(out, z / (1 + np.exp(-z))) < 3e-3


def test_steps_and_blocks_of_the_convolution_move_no_bit(monkeypatch):
    """Two whole blocks of 16 rows and a part; of two sequences one goes on from the state."""
    x, w, state = normal(0, 36, 128), normal(1, 128, 4), normal(2, 6, 128)
    position = np.concatenate([np.arange(2, 12), np.arange(26)])  # the first has two cached inputs
    source = np.arange(36)[:, None] - np.arange(3, -1, -1)
    source = np.where(position[:, None] < np.arange(3, -1, -1), -1, source)
    source[0, 1:3], source[1, 0:2], source[2, 0] = (-6, -7), (-6, -7), -7
    arguments = x, w, state, jnp.asarray(source, I32)
    with interpreted():
        alone = convolution(*arguments)
        monkeypatch.setattr(rows_convolution, "_MANY", 1)
        together = convolution(*arguments)
    assert same_bits(alone, together)


def test_one_row_of_a_convolution_and_the_state_after_it():
    """Rows at positions 7, 0, 2 and of no token; slots of others and layer 0 stay as they are."""
    xs, ws = (normal(0, 4, 128), normal(1, 4, 256)), (normal(2, 128, 4), normal(3, 256, 4))
    state = normal(4, 2, 5, 3, 384).at[1, 0].set(jnp.nan).at[1, 3, 0].set(jnp.nan)
    slot, position = [4, 0, 3, 2], [7, 0, 2]
    rows = [-2 - (15 + 3 * s + np.arange(3)) for s in slot]
    source = np.concatenate([np.asarray(rows), np.arange(4)[:, None]], axis=1)
    source[:3] = np.where(np.asarray(position)[:, None] < [3, 2, 1, 0], -1, source[:3])
    source[3] = -1
    place = state.reshape(-1, 384), jnp.asarray(source, I32)
    known = jnp.asarray([min(p, 3) for p in position] + [-1], I32)
    with interpreted():
        expected = [convolution(xs[i], ws[i], *place, 128 * i) for i in range(2)]
        held = jax.new_ref(state)
        outs = convolution_step(xs, jnp.concatenate(ws), held, 1, jnp.asarray(slot, I32), known)
    for out, want in zip(outs, expected, strict=True):
        assert same_bits(out[:3], want[:3]) and not np.any(out[3])
    x, none = jnp.concatenate(xs, axis=1), jnp.zeros(384, BF16)
    after = state.at[1, 4].set(jnp.stack([state[1, 4, 1], state[1, 4, 2], x[0]]))
    after = after.at[1, 0].set(jnp.stack([none, none, x[1]]))
    after = after.at[1, 3].set(jnp.stack([state[1, 3, 1], state[1, 3, 2], x[2]]))
    assert same_bits(jax.freeze(held), after)


def test_convolution_backward():
    """Leaves of 72 rows, a block and a part of one; the last rows are no tokens."""
    tokens, lengths = 144, (50, 22, 64)
    real = sum(lengths)
    x, w, dy = normal(0, tokens, 128), normal(1, 128, 4), normal(2, tokens, 128)
    stale = jnp.arange(tokens)[:, None] >= real
    position = np.concatenate([*(np.arange(n) for n in lengths), np.full(tokens - real, -1)])
    back = np.arange(3, -1, -1)
    source = np.where(position[:, None] < back, -1, np.arange(tokens)[:, None] - back)
    follower = np.full((tokens, 4), -1)
    for t, j in np.argwhere(source >= 0):
        follower[source[t, j], j] = t

    def formula(x, w):
        window = jnp.where((source >= 0)[..., None], x[np.maximum(source, 0)], 0)
        return jax.nn.silu((window * w.T).sum(1))

    with interpreted():
        dx, dw = convolution_backward(
            jnp.where(stale, jnp.nan, x),
            w,
            jnp.asarray(source, I32),
            jnp.asarray(follower, I32),
            jnp.where(stale, jnp.nan, dy),
            2,
        )
    expected = vjp(formula, [x, w], f64(jnp.where(stale, 0, dy)))
    assert error(dx, expected[0]) < 3e-3 and error(dw.sum(0).T, expected[1]) < 1e-6


def test_slots_combine_and_their_gradients_travel_back():
    y, dout = normal(0, 20, 128), normal(1, 4, 128)
    place = np.random.default_rng(2).permutation(20)[:16].reshape(4, 4)
    weights = normal(3, 4, 4, dtype=F32)
    at = jnp.asarray(place, I32)
    with interpreted():
        out, plain = combine_slots(y, at, weights), combine_slots(y, at)
        dweights = slot_dots(y, at, dout)
    rows, w, d = f64(y)[place], f64(weights)[..., None], f64(dout)[:, None]
    assert error(out, (rows * w).sum(1)) < 3e-3 and error(plain, rows.sum(1)) < 3e-3
    assert error(dweights, (rows * d).sum(2)) < 1e-6


def test_rows_are_taken_as_they_are_and_zero_where_there_is_no_token():
    x = normal(0, 5, 128).at[4].set(jnp.nan).at[2, 0].set(-0.0)
    token = jnp.asarray([2, 5, 0, 2, 5, 3, 1, 5], I32)
    scale = normal(1, 8, dtype=F32)
    rows = x.at[token].get(mode="fill", fill_value=0)
    with interpreted():
        plain, scaled = take_rows(x, token), take_rows(x, token, scale)
    assert same_bits(plain, rows)
    assert same_bits(scaled, jnp.where(token == 5, 0, rows.T.astype(F32) * scale).T.astype(BF16))


def test_embedding_gradient_adds_repeated_tokens():
    tokens = np.array([3, 0, 3, 9, -1, 3, 0, 7])  # 9 and -1 are outside the table
    dout = normal(0, 8, 128)
    with interpreted():
        out = embedding_gradient(jnp.asarray(tokens, I32), dout, 8, 2)
    expected = np.zeros((8, 128))
    for token, row in zip(tokens, f64(dout), strict=True):
        if 0 <= token < 8:
            expected[token] += row
    assert error(out, expected) < 1e-6


T, H = 10240, 2048
WIDE, HEADS = ((T, H), BF16), ((T * 32, 128), BF16)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (FORMULAS["rms_norm"][2], [WIDE, ((H,), BF16)]),
        (FORMULAS["rms_norm"][2], [((1, H), BF16), ((H,), BF16)]),
        (FORMULAS["rms_norm"][3], [WIDE, ((H,), BF16), WIDE]),
        (FORMULAS["gated_rms_norm"][2], [HEADS, HEADS, ((128,), BF16)]),
        (FORMULAS["gated_rms_norm"][3], [HEADS, HEADS, ((128,), BF16), HEADS]),
        (FORMULAS["l2_norm"][2], [HEADS]),
        (add, [WIDE, WIDE]),
        (swiglu_backward, [((T, 512), BF16)] * 3),
        (sigmoid_gate, [WIDE, WIDE]),
        (gated_add, [WIDE, WIDE, ((T,), BF16)]),
        (softmax, [((T, 256), F32)]),
        (softmax_chosen, [((T, 8), F32)]),
        (rotary, [((T, 16, 256), BF16), ((T, 32), F32), ((T, 32), F32)]),
        (rotary, [((1, 2, 256), BF16), ((1, 32), F32), ((1, 32), F32)]),
        (functools.partial(token_sum, leaves=8), [((T, H), F32)]),
        (
            convolution,
            [((T, 8192), BF16), ((8192, 4), BF16), ((768, 8192), BF16), ((T, 4), I32)],
        ),
        (
            lambda x, v, w, s, *rest: convolution_step((x, x, v), w, jax.new_ref(s), *rest),
            [((256, 2048), BF16), ((256, 4096), BF16), ((8192, 4), BF16)]
            + [((30, 256, 3, 8192), BF16)]
            + [((), I32), ((256,), I32), ((256,), I32)],
        ),
        (
            functools.partial(convolution_backward, leaves=8),
            [((T, 8192), BF16), ((8192, 4), BF16), *[((T, 4), I32)] * 2, ((T, 8192), BF16)],
        ),
        (combine_slots, [((T * 8, H), BF16), ((T, 8), I32), ((T, 8), F32)]),
        (slot_dots, [((T * 8, H), BF16), ((T, 8), I32), WIDE]),
        (take_rows, [WIDE, ((T * 8,), I32), ((T * 8,), F32)]),
        (functools.partial(embedding_gradient, size=248320, leaves=8), [((T,), I32), WIDE]),
    ],
)
def test_lowers_for_cuda(function, shapes):
    assert calls_mosaic(function, *shapes)
