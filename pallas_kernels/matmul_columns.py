"""Several linear maps of few rows in one launch: y_i = x w_i for weights of one input.

    out_i[m, n] = sum over k, in order, of x[m, k] w_i[k, n]

Each by itself has too few tiles to keep the memory busy, and its start and its end take as long as
its bytes. The bits are those of `matmul(x, w_i)`: one leaf, K upwards in one float32 accumulator,
one rounding. An element depends on its own row of x and its own column of its own w_i alone.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import matmul_core as core
from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels.tuning import MatmulTile, matmul_columns_tile


def matmul_columns(
    x: jax.Array, ws: tuple[jax.Array, ...], *, tile: MatmulTile | None = None
) -> tuple[jax.Array, ...]:
    """Products of one x with several weights.

    Args:
      x: [M, K] bfloat16.
      ws: weights [K, N_i] bfloat16, of any widths.
      tile: tile choice, the same for all; by default the tuning table's. It does not change the
        result.

    Returns:
      [M, N_i] bfloat16, one a weight.

    Raises:
      ValueError: for other dtypes, or weights of another K.
    """
    m, k = x.shape
    for w in ws:
        if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
            raise ValueError(f"operands must be bfloat16, not {x.dtype} and {w.dtype}")
        if w.shape[0] != k:
            raise ValueError(f"{x.shape} and {w.shape} have no product")
    if tile is None:
        tile = matmul_columns_tile(m, sum(w.shape[1] for w in ws))
    padded = [core.whole_lines(w) for w in ws]
    rows = core.whole_rows(m)
    shared, own = [(core.whole_lines(x),)], [(w,) for w in padded]
    outs = few_rows.products(
        own if tile.swap else shared,
        shared if tile.swap else own,
        contractions=[k],
        tile=tile,
        out_types=[jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype) for w in padded],
        leaves=1,
        lhs_transposed=tile.swap,
        rhs_transposed=tile.swap,
    )
    return tuple(
        out if out.shape == (m, w.shape[1]) else out[:m, : w.shape[1]]
        for out, w in zip(outs, ws, strict=True)
    )
