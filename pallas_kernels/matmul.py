"""Dense matrix product for Hopper with a declared summation order: bfloat16 in, float32 sums.

    out[m, n] = tree over leaves l of ( sum over k in leaf l, in order, of a[m, k] b[k, n] )

With one leaf it is the column form, for a contraction that no mesh axis cuts. With `leaves` > 1
(a power of two) the contraction is cut into equal contiguous leaves, each summed from zero, and the
leaf sums combine in a balanced binary tree: a rank that owns a subtree calls this with its own
leaves and float32 output, and adding the ranks' results in the same tree gives the same bits.

The three products of a linear layer y = x w are one kernel:
    y  = matmul(x, w)                      contraction over the input features
    dx = matmul(dy, w, transpose_b=True)   contraction over the output features
    dw = matmul(x, dy, transpose_a=True)   contraction over tokens, with batch leaves

An element depends on its own row of `a`, its own column of `b` and `leaves`, on nothing else: not
on M, N, the tile, the row's place, or `swap`, which evaluates out^T = b^T a^T so that a few rows
sit in the 8-wide side of the instruction.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import matmul_core as core
from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels.matmul_product import product
from pallas_kernels.tuning import MatmulTile, matmul_tile


def matmul(
    a: jax.Array | tuple[jax.Array, ...],
    b: jax.Array | tuple[jax.Array, ...],
    *,
    leaves: int = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    tile: MatmulTile | None = None,
) -> jax.Array:
    """Product with the summation order of the module's docstring.

    Args:
      a: [M, K] bfloat16, or [K, M] with `transpose_a`; or a tuple of them with the same M and any
        K_i, whose products are summed: leaf l takes its part of K_0, then of K_1, ... (the input
        gradient of several linear maps of one input).
      b: [K, N] bfloat16, or [N, K] with `transpose_b`; a tuple beside a tuple of `a`.
      leaves: equal parts of K (of every K_i) that are summed apart and combined in a binary tree.
      transpose_a, transpose_b: how the operands lie in memory.
      out_dtype: float32, or bfloat16 (one rounding of the float32 sum).
      tile: tile choice; by default the tuning table's. It does not change the result.

    Returns:
      [M, N] of `out_dtype`.

    Raises:
      ValueError: for other dtypes, mismatched shapes, leaves that are not a power of two or do not
        divide K, a tile without room for their sums, or a swapped tile for a transposed `a`.
    """
    lhs, rhs = (a, b) if isinstance(a, tuple) else ((a,), (b,))
    m, n = lhs[0].shape[transpose_a], rhs[0].shape[not transpose_b]
    contractions = []
    for x, y in zip(lhs, rhs, strict=True):
        if x.dtype != jnp.bfloat16 or y.dtype != jnp.bfloat16:
            raise ValueError(f"operands must be bfloat16, not {x.dtype} and {y.dtype}")
        k = x.shape[not transpose_a]
        if (x.shape[transpose_a], y.shape[not transpose_b], y.shape[transpose_b]) != (m, n, k):
            raise ValueError(
                f"{x.shape} and {y.shape} do not make [{m}, {n}] ({transpose_a=}, {transpose_b=})"
            )
        core.check_leaves(k, leaves)
        contractions.append(k)
    if n == 1 and not transpose_b:  # a column lies in memory as a row does, and needs no padding
        rhs, transpose_b = tuple(y.reshape(1, -1) for y in rhs), True
    if tile is None:
        # Few rows of a transposed operand are too narrow for a swizzled line.
        tile = matmul_tile(max(m, 128) if transpose_a else m, n, sum(contractions), leaves)
    if tile.swap and transpose_a:
        raise ValueError("a transposed `a` cannot be swapped")
    lhs, rhs = (
        tuple(core.whole_lines(core.whole_leaves(x, axis, leaves)) for x in xs)
        for xs, axis in ((lhs, int(not transpose_a)), (rhs, int(transpose_b)))
    )
    padded_m, padded_n = core.whole_rows(m), core.whole_cols(n)
    transpose_lhs, transpose_rhs = transpose_a, transpose_b
    rows, cols = padded_m, padded_n
    if tile.swap:
        lhs, rhs, rows, cols = rhs, lhs, cols, rows
        transpose_lhs, transpose_rhs = not transpose_b, not transpose_a

    narrow = not transpose_rhs and tile.cols % core.TILE_K > 0  # less than a line of `rhs`
    if tile.split > 1 or narrow:
        (out,) = few_rows.products(
            [lhs],
            [rhs],
            contractions=contractions,
            tile=tile,
            out_types=[jax.ShapeDtypeStruct((padded_m, padded_n), out_dtype)],
            leaves=leaves,
            lhs_transposed=transpose_lhs,
            rhs_transposed=transpose_rhs,
        )
        return out if out.shape == (m, n) else out[:m, :n]

    def epilogue(acc, row, col_tile, wg, _, outs, smem):
        core.store_tile(
            (acc,),
            smem["out"].at[wg],
            outs,
            row,
            col_tile * tile.cols,
            dtype=out_dtype,
            transposed=tile.swap,
        )

    (out,) = product(
        lhs,
        rhs,
        (),
        contractions=contractions,
        rows=rows,
        col_tiles=pl.cdiv(cols, tile.cols),
        col_of=lambda c: c * tile.cols,
        tile=tile,
        epilogue=epilogue,
        out_type=[jax.ShapeDtypeStruct((padded_m, padded_n), out_dtype)],
        out_dtype=out_dtype,
        name="matmul",
        leaves=leaves,
        lhs_transposed=transpose_lhs,
        rhs_transposed=transpose_rhs,
    )
    return out if out.shape == (m, n) else out[:m, :n]
