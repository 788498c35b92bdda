"""Expert products: against float64 in the interpreter, lowering at the 35B model's shapes."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul_core
from pallas_kernels.grouped_matmul import (
    aligned_starts,
    grouped_matmul,
    grouped_swiglu,
    grouped_swiglu_backward,
    row_tiles,
)
from pallas_kernels.grouped_matmul_dw import grouped_matmul_dw
from pallas_kernels.matmul import matmul
from pallas_kernels.rows_routing import expert_rows
from pallas_kernels.tuning import MatmulTile
from tests.kernels import BF16, F32, I32, calls_mosaic, error, f64, interpreted, normal, same_bits

PLAIN = MatmulTile(rows=64, cols=64, stages=2)
SWAPPED = MatmulTile(rows=64, cols=8, stages=2, warpgroups=1, swap=True)
SIZES = np.array([0, 5, 66, 1])
GROUPS = len(SIZES)


class Case:
    """Four ragged groups; rows of no group are NaN, which must reach no result."""

    def __init__(self, k, n):
        self.sizes = jnp.asarray(SIZES, I32)
        self.starts = aligned_starts(self.sizes)
        self.spans = [slice(s, s + c) for s, c in zip(np.asarray(self.starts), SIZES, strict=True)]
        self.rows = np.concatenate([np.arange(s.start, s.stop) for s in self.spans])
        self.count = int(self.rows[-1]) + 9
        self.x, self.w = self.array(0, k), normal(1, GROUPS, k, n)

    def array(self, seed, width):
        x = normal(seed, self.count, width)
        owned = np.zeros(self.count, bool)
        owned[self.rows] = True
        return jnp.where(owned[:, None], x, jnp.nan)

    def product(self, x, w):
        x, w = f64(x), f64(w)
        return np.concatenate([x[s] @ w[g] for g, s in enumerate(self.spans)])


def test_starts_are_aligned_and_do_not_overlap():
    starts = np.asarray(aligned_starts(jnp.asarray(SIZES, I32)))
    assert (starts % 8 == 0).all() and (starts[1:] >= (starts + SIZES)[:-1]).all()


@pytest.mark.parametrize("height", [8, 64])
def test_row_tiles_cover_every_row_once(height):
    sizes = jnp.asarray(SIZES, I32)
    starts = aligned_starts(sizes)
    table, count = row_tiles(starts, sizes, 120, height)
    covered = [
        (int(g), row)
        for g, first, size in np.asarray(table).T[: int(count[0])]
        for row in range(first, first + size)
    ]
    expected = [
        (g, row)
        for g, (s, c) in enumerate(zip(np.asarray(starts), SIZES, strict=True))
        for row in range(s, s + c)
    ]
    assert covered == expected


@pytest.mark.parametrize("tile", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_rows_meet_their_groups_matrix(tile):
    case = Case(64, 72)
    with interpreted():
        out = grouped_matmul(case.x, case.w, case.starts, case.sizes, out_dtype=F32, tile=tile)
    assert error(out[case.rows], case.product(case.x, case.w)) < 1e-6


def test_several_contractions():
    case = Case(64, 64)
    y, v = case.array(2, 128), normal(3, GROUPS, 64, 128)
    with interpreted():
        out = grouped_matmul(
            (case.x, y),
            (jnp.swapaxes(case.w, 1, 2), v),
            case.starts,
            case.sizes,
            transpose_w=True,
            out_dtype=F32,
            tile=PLAIN,
        )
    expected = case.product(case.x, case.w) + case.product(y, jnp.swapaxes(v, 1, 2))
    assert error(out[case.rows], expected) < 1e-6


@pytest.mark.parametrize("block", [8, 64])
def test_routed_rows_lie_by_expert_and_token(block):
    tokens, slots, experts = 16, 2, 3
    chosen = np.random.default_rng(0).integers(-1, experts + 1, (tokens, slots))
    laid = expert_rows(jnp.asarray(chosen, I32), experts, block)
    starts, sizes, place, token = (np.asarray(x) for x in laid)
    capacity = len(token)
    assert (starts[1:] == (starts + sizes)[:-1]).all() and (starts + sizes <= capacity).all()
    for e in range(experts):
        rows = np.argwhere(chosen == e)
        assert sizes[e] == len(rows) + -len(rows) % block
        for rank, (t, j) in enumerate(rows):
            assert place[t, j] == starts[e] + rank and token[place[t, j]] == t
    nowhere = (chosen < 0) | (chosen >= experts)
    assert (place[nowhere] == capacity).all()
    assert (token < tokens).sum() == (~nowhere).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("tile", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_swiglu(tile):
    case = Case(64, 64)
    up = normal(2, GROUPS, 64, 64)
    with interpreted():
        out = grouped_swiglu(case.x, case.w, up, case.starts, case.sizes, tile=tile)
    g, u = case.product(case.x, case.w), case.product(case.x, up)
    assert error(out[case.rows], g * sigmoid(g) * u) < 3e-3


@pytest.mark.parametrize("tile", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_swiglu_backward(tile):
    case = Case(64, 64)
    up, down = normal(2, GROUPS, 64, 64), normal(3, GROUPS, 64, 128)
    dy = case.array(4, 128)
    groups = case.starts, case.sizes
    with interpreted():
        hidden, kept = grouped_swiglu(case.x, case.w, up, *groups, keep=True, tile=tile)
        outs = grouped_swiglu_backward(kept, down, dy, *groups, tile=tile)
    assert same_bits(hidden[case.rows], outs[2][case.rows])
    g, u = case.product(case.x, case.w), case.product(case.x, up)
    dh, s = case.product(dy, jnp.swapaxes(down, 1, 2)), sigmoid(g)
    expected = dh * u * s * (1 + g * (1 - s)), dh * g * s, g * s * u
    for out, reference in zip(outs, expected, strict=True):
        assert error(out[case.rows], reference) < 3e-3


def test_weight_gradient():
    case = Case(72, 64)
    dy = case.array(2, 64)
    with interpreted():
        out = grouped_matmul_dw(case.x, dy, case.starts, case.sizes, out_dtype=F32, tile=PLAIN)
    assert error(out, np.stack([f64(case.x)[s].T @ f64(dy)[s] for s in case.spans])) < 1e-6


@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swapped"])
def test_warpgroups_may_take_tiles_by_turns(swap, monkeypatch):
    monkeypatch.setattr(matmul_core, "sm_count", lambda: 2)  # several tiles a block
    together = MatmulTile(rows=64, cols=16 if swap else 64, stages=2, swap=swap)
    by_turns = dataclasses.replace(together, stages=3, turns=True)
    case, up, down = Case(64, 192), normal(2, GROUPS, 64, 192), normal(3, GROUPS, 192, 64)
    groups, dy = (case.starts, case.sizes), case.array(4, 64)

    def results(tile):
        hidden, kept = grouped_swiglu(case.x, case.w, up, *groups, keep=True, tile=tile)
        yield hidden
        yield from grouped_swiglu_backward(kept, down, dy, *groups, tile=tile)
        yield grouped_matmul(case.x, case.w, *groups, tile=tile)

    with interpreted():
        for one, other in zip(results(together), results(by_turns), strict=True):
            assert same_bits(one[case.rows], other[case.rows])
        if not swap:
            one, other = (
                grouped_matmul_dw(case.x, dy, *groups, tile=t) for t in (together, by_turns)
            )
            assert same_bits(one, other)


def test_refusals():
    case = Case(72, 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        grouped_matmul(case.x, case.w, case.starts, case.sizes)
    with pytest.raises(ValueError, match="rows must agree"):
        grouped_matmul_dw(case.x, case.x[1:], case.starts, case.sizes)


R, DECODE, E, H, N = 83968, 3840, 256, 2048, 512
GROUP = ((E,), I32)
KEPT = (2, (R // 128 + E) * (N // 128), 2, 64, 128)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (grouped_matmul, [((R, N), BF16), ((E, N, H), BF16)]),
        (grouped_matmul, [((DECODE, N), BF16), ((E, N, H), BF16)]),
        (
            functools.partial(grouped_matmul, out_dtype=F32),
            [((DECODE, N), BF16), ((E, N, H), BF16)],
        ),
        (
            functools.partial(grouped_matmul, transpose_w=True),
            [((R, H), BF16), ((E, N, H), BF16)],
        ),
        (grouped_swiglu, [((R, H), BF16), ((E, H, N), BF16), ((E, H, N), BF16)]),
        (grouped_swiglu, [((DECODE, H), BF16), ((E, H, N), BF16), ((E, H, N), BF16)]),
        (
            functools.partial(grouped_swiglu, keep=True),
            [((R, H), BF16), ((E, H, N), BF16), ((E, H, N), BF16)],
        ),
        (grouped_swiglu_backward, [(KEPT, F32), ((E, N, H), BF16), ((R, H), BF16)]),
        (grouped_matmul_dw, [((R, H), BF16), ((R, N), BF16)]),
    ],
    ids=[
        "down",
        "down decode",
        "f32",
        "dx",
        "swiglu",
        "swiglu decode",
        "swiglu keep",
        "swiglu backward",
        "dw",
    ],
)
def test_lowers_for_cuda(function, shapes):
    assert calls_mosaic(function, *shapes, GROUP, GROUP)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [None, PLAIN, SWAPPED], ids=["table", "plain", "swapped"])
def test_rows_and_gradients_are_exact_on_a_device(tile):
    case = Case(128, 64)
    out = grouped_matmul(case.x, case.w, case.starts, case.sizes, out_dtype=F32, tile=tile)
    dy = case.array(2, 64)
    dw = grouped_matmul_dw(case.x, dy, case.starts, case.sizes)
    for g, span in enumerate(case.spans):
        if span.start < span.stop:
            alone = matmul(case.x[span], case.w[g], out_dtype=F32)
            assert same_bits(out[span], alone)
            alone = matmul(case.x[span], dy[span], transpose_a=True, out_dtype=F32)
            assert same_bits(dw[g], alone)
