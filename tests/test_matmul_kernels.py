"""Dense products: against float64 in the interpreter, lowering at the 35B model's shapes."""

import functools

import jax
import numpy as np
import pytest

from isojax.numerics.policy import KERNEL_LEAVES
from pallas_kernels import matmul_core as core
from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul_columns import matmul_columns
from pallas_kernels.tuning import SHARED_MEMORY, MatmulTile, matmul_columns_tile, matmul_tile
from tests.kernels import BF16, F32, calls_mosaic, error, f64, interpreted, normal, same_bits

PLAIN = MatmulTile(rows=64, cols=64, stages=2)
SPLIT = MatmulTile(rows=64, cols=16, stages=8, warpgroups=1, swap=True, split=4)
SWAPPED = MatmulTile(rows=64, cols=8, stages=4, warpgroups=1, swap=True)


@pytest.mark.parametrize("dtype, bound", [(F32, 1e-6), (BF16, 3e-3)])
def test_columns(dtype, bound):
    a, b = normal(0, 70, 128), normal(1, 128, 136)
    with interpreted():
        out = matmul(a, b, out_dtype=dtype, tile=PLAIN)
    assert out.dtype == dtype and error(out, f64(a) @ f64(b)) < bound


@pytest.mark.parametrize("transpose_a, tile", [(False, PLAIN), (False, SWAPPED), (True, PLAIN)])
def test_operands_lie_either_way(transpose_a, tile):
    a, b = normal(0, 9, 128), normal(1, 128, 72)
    transposed = (a.T, b) if transpose_a else (a, b.T)
    with interpreted():
        out = matmul(
            *transposed,
            transpose_a=transpose_a,
            transpose_b=not transpose_a,
            out_dtype=F32,
            tile=tile,
        )
    assert error(out, f64(a) @ f64(b)) < 1e-6


@pytest.mark.parametrize("cols, leaves", [(16, 1), (32, 2)])
def test_narrow_tiles(cols, leaves):
    """Columns of less than a line, and fewer rows than a tile's."""
    a, b = normal(0, 9, 256), normal(1, 256, 128)
    with interpreted():
        out = matmul(
            a, b, leaves=leaves, out_dtype=F32, tile=MatmulTile(64, cols, warpgroups=1, stages=2)
        )
    assert error(out, f64(a) @ f64(b)) < 1e-6


def leaf_sum(a, b, leaves, **options):
    """The leaves as products of their own, added in the tree."""
    width = a.shape[1] // leaves
    parts = [
        matmul(a[:, i : i + width], b[i : i + width], out_dtype=F32, **options)
        for i in range(0, a.shape[1], width)
    ]
    while len(parts) > 1:
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# The interpreter's dot is XLA's, whose bits depend on the shape: compare tiles of one shape here.
@pytest.mark.parametrize(
    "tile, alone",
    [
        (PLAIN, PLAIN),
        (MatmulTile(rows=64, cols=128, stages=2), PLAIN),
        (SWAPPED, SWAPPED),
    ],
    ids=["registers", "registers and shared memory", "swapped"],
)
def test_leaves_are_products_of_their_own(tile, alone):
    a, b = normal(0, 8, 512), normal(1, 512, 64)
    with interpreted():
        out = matmul(a, b, leaves=8, out_dtype=F32, tile=tile)
        apart = leaf_sum(a, b, 8, tile=alone)
    assert same_bits(out, apart)


def test_narrow_leaves_and_several_contractions():
    a, b = normal(0, 8, 32), normal(1, 32, 64)
    c, d = normal(2, 8, 128), normal(3, 128, 64)
    with interpreted():
        out = matmul((a, c), (b, d), leaves=2, out_dtype=F32, tile=PLAIN)
        halves = [
            matmul((a[:, i], c[:, j]), (b[i], d[j]), out_dtype=F32, tile=PLAIN)
            for i, j in ((slice(16), slice(64)), (slice(16, 32), slice(64, 128)))
        ]
    assert error(out, f64(a) @ f64(b) + f64(c) @ f64(d)) < 1e-6
    assert same_bits(out, halves[0] + halves[1])


@pytest.mark.parametrize("rows, tile", [(1, None), (9, SWAPPED), (70, PLAIN)])
def test_one_column(rows, tile):
    a, b = normal(0, rows, 128), normal(1, 128, 1)
    with interpreted():
        out = matmul(a, b, out_dtype=F32, tile=tile)
    assert out.shape == (rows, 1) and error(out, f64(a) @ f64(b)) < 1e-6


def test_tree_is_balanced():
    for leaves in (1, 2, 4, 8):
        index = iter(range(leaves))
        text = core.leaf_tree(lambda index=index: Symbol(str(next(index))), leaves)
        assert str(text) == {1: "0", 2: "(0+1)", 4: "((0+1)+(2+3))"}.get(
            leaves, "(((0+1)+(2+3))+((4+5)+(6+7)))"
        )


@pytest.mark.parametrize("leaves", [1, 2, 4, 8, KERNEL_LEAVES])
@pytest.mark.parametrize("n", [32, 512, 2048, 12288, 248320])
def test_table_fits_shared_memory(n, leaves):
    for m in (1, 8, 17, 33, 56, 64, 65, 128, 129, 256, 512, 513, 10240):
        for k in (512, 2048, 12288):
            tile = matmul_tile(m, n, k, leaves)
            taken = few_rows.shared_bytes if tile.split > 1 else core.shared_bytes
            assert taken(tile, leaves, F32) <= SHARED_MEMORY


@pytest.mark.parametrize("n", [1024, 9216, 12352])
def test_table_of_several_weights_fits_shared_memory(n):
    for m in (1, 8, 16, 17, 64, 65, 100, 128, 129, 256, 1000):
        assert few_rows.shared_bytes(matmul_columns_tile(m, n), 1, BF16) <= SHARED_MEMORY


SEVERAL = [1, 32, 520, 64]  # widths of weights of one input


@pytest.mark.parametrize(
    "m, tile",
    [
        (1, SWAPPED),
        (5, SWAPPED),
        (64, MatmulTile(64, 64, warpgroups=1, stages=2, swap=True)),
        (100, MatmulTile(64, 64, warpgroups=2, stages=2, swap=True)),
        (9, MatmulTile(64, 16, warpgroups=1, stages=2)),
        (100, MatmulTile(64, 32, warpgroups=1, stages=2)),
    ],
)
def test_several_weights(m, tile):
    """Column tiles of one product after another, with the bits of each by itself."""
    x, ws = normal(0, m, 192), tuple(normal(i, 192, n) for i, n in enumerate(SEVERAL, 1))
    with interpreted():
        outs = matmul_columns(x, ws, tile=tile)
        apart = [matmul(x, w, tile=tile) for w in ws]
    for out, alone, w in zip(outs, apart, ws, strict=True):
        assert same_bits(out, alone) and error(out, f64(x) @ f64(w)) < 3e-3


def test_refusals_of_several_weights():
    x, w = normal(0, 8, 64), normal(1, 64, 64)
    with pytest.raises(ValueError, match="no product"):
        matmul_columns(x, (w, w[:32]))
    with pytest.raises(ValueError, match="bfloat16"):
        matmul_columns(x, (w, w.astype(F32)))


class Symbol(str):
    def __add__(self, other):
        return Symbol(f"({str(self)}+{str(other)})")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(leaves=3), "power of two"),
        (dict(leaves=8), "does not split"),
        (dict(transpose_b=True), "do not make"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        matmul(normal(0, 8, 132), normal(1, 132, 64), **arguments)
    with pytest.raises(ValueError, match="bfloat16"):
        matmul(normal(0, 8, 64, dtype=F32), normal(1, 64, 64, dtype=F32))


@pytest.mark.parametrize("cols, leaves", [(128, 16), (256, 4)])
def test_refuses_a_tile_without_room_for_its_sums(cols, leaves):
    a, b = normal(0, 8, 1024), normal(1, 1024, 64)
    with pytest.raises(ValueError, match="MatmulTile.* needs fewer rows or columns"):
        matmul(a, b, leaves=leaves, tile=MatmulTile(rows=64, cols=cols))


H, WIDE = 2048, 12288


@pytest.mark.parametrize(
    "a, b, options",
    [
        ((10240, H), (H, WIDE), {}),
        ((10240, H), (H, 256), dict(out_dtype=F32)),
        ((10240, 4096), (4096, H), dict(leaves=8)),
        ((10240, H), (4096, H), dict(transpose_b=True)),
        ((10240, H), (10240, 4096), dict(transpose_a=True, leaves=8, out_dtype=F32)),
        ((1, H), (H, 4096), {}),
        ((64, 4096), (4096, H), dict(leaves=8)),
        ((256, 512), (512, H), dict(leaves=8)),
        ((1, H), (H, 248320), dict(out_dtype=F32)),
        ((16, H), (H, 512), dict(tile=MatmulTile(64, 16, warpgroups=1, stages=16))),
        ((16, 4096), (4096, H), dict(leaves=8, tile=SPLIT)),
        ((1000, 4096), (4096, H), dict(leaves=8, tile=MatmulTile(64, 128, split=4))),
    ],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_lowers_for_cuda(a, b, options):
    assert calls_mosaic(functools.partial(matmul, **options), (a, BF16), (b, BF16))


GATED_DELTA, ATTENTION, SHARED = (H, H, 4096, 4096, 32, 32), (4096, 512, 512, 4096), (512, 512)


@pytest.mark.parametrize("widths", [GATED_DELTA, ATTENTION, SHARED], ids=len)
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_several_weights_lower_for_cuda(m, widths):
    ws = [((H, n), BF16) for n in widths]
    assert calls_mosaic(lambda x, *ws: matmul_columns(x, ws), ((m, H), BF16), *ws)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [GATED_DELTA, SHARED, SEVERAL], ids=len)
def test_several_weights_are_exact_on_a_device(widths):
    ws = tuple(normal(i, H, n) for i, n in enumerate(widths, 1))
    for m in (1, 9, 16, 64, 100, 256):
        x = normal(0, m, H)
        apart = [matmul(x, w) for w in ws]
        assert all(map(same_bits, jax.jit(matmul_columns)(x, ws), apart))


@pytest.mark.gpu
@pytest.mark.parametrize("leaves", [1, 8])
def test_rows_are_exact_on_a_device(leaves):
    a, b = normal(0, 1030, 1024), normal(1, 1024, 512)
    product = jax.jit(functools.partial(matmul, leaves=leaves, out_dtype=F32))
    whole = product(a, b)
    order = np.random.default_rng(2).permutation(1030)
    assert same_bits(product(a[order], b), whole[order])
    for m in (1, 7, 8, 9, 64, 65, 129, 513):
        assert same_bits(product(a[:m], b), whole[:m])
    assert same_bits(jax.jit(leaf_sum, static_argnums=2)(a, b, leaves), whole)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        SPLIT,
        MatmulTile(64, 64, stages=8, warpgroups=1, swap=True, split=4),
        MatmulTile(64, 128, split=4),
        MatmulTile(64, 16, stages=16, warpgroups=1),
    ],
    ids=["first block joins", "every block joins", "two warpgroups", "narrow"],
)
def test_more_blocks_move_no_bit_on_a_device(tile):
    b = normal(1, 1024, 512)
    product = functools.partial(matmul, leaves=8, out_dtype=F32)
    for m in (1, 9, 16, 65, 300):
        a = normal(m, m, 1024)
        assert same_bits(jax.jit(functools.partial(product, tile=tile))(a, b), product(a, b))
