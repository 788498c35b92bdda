"""Gradient of an embedding table: rows of one token add up in order, batch leaves in a tree."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves, leaf_tree
from pallas_kernels.rows import thread_vectors
from pallas_kernels.rows_token_sum import SLAB, ordered_sum

_ROWS = 16  # rows of the table that a block writes


def embedding_gradient(tokens: jax.Array, dout: jax.Array, size: int, leaves: int) -> jax.Array:
    """Sum of dout's rows by token: in a batch leaf in row order, leaves in a balanced binary tree.

    Every row of the table is written once, most of them with zeros.

    Args:
      tokens: [T] int32, rows of the table; one outside [0, size) goes nowhere.
      dout: [T, H] bfloat16, H a multiple of 128.
      size: rows of the table.
      leaves: equal contiguous parts of the rows, a power of two.

    Returns:
      [size, H] float32.

    Raises:
      ValueError: if H is not a multiple of 128, or for leaves that do not divide T.
    """
    rows, width = dout.shape
    check_leaves(rows, leaves)
    if width % SLAB:
        raise ValueError(f"a row of {width} elements is not a multiple of {SLAB}")
    slab = SLAB * thread_vectors(width)
    token = jnp.where((tokens >= 0) & (tokens < size), tokens, size).astype(jnp.int32)
    order = jnp.argsort(token, stable=True).astype(jnp.int32)
    token = token[order]
    # Where the rows of (token, leaf) begin among the sorted ones, for the token of every position.
    key = token * leaves + order // (rows // leaves)
    bounds = _begins(key, token[:, None] * leaves + jnp.arange(leaves + 1))
    blocks = pl.cdiv(size, _ROWS)
    begins = _begins(token, jnp.minimum(jnp.arange(blocks + 1) * _ROWS, size))

    def body(order_gmem, token_gmem, bounds_gmem, begins_gmem, dout_gmem, out):
        block, span = lax.axis_index("block"), pl.ds(lax.axis_index("slab") * slab, slab)
        begin, end = begins_gmem[block], begins_gmem[block + 1]
        zero = jnp.zeros((slab,), jnp.float32)

        def sums(row, position):
            index = iter(range(leaves))

            def leaf():
                i = next(index)
                begin, end = bounds_gmem[position, i], bounds_gmem[position, i + 1]
                return ordered_sum(
                    lambda j: dout_gmem[order_gmem[begin + j], span].astype(jnp.float32),
                    end - begin,
                    zero,
                )

            out[row, span] = leaf_tree(leaf, leaves)
            return bounds_gmem[position, leaves]

        def zeros(row, position):
            out[row, span] = zero
            return position

        def write(row, position):
            here = lax.min(position, end - 1)
            found = jnp.logical_and(position < end, token_gmem[here] == row)
            return lax.cond(found, sums, zeros, row, position)

        first = block * _ROWS
        last = lax.min(first + _ROWS, size)

        @pl.when(begin == end)
        def _empty():
            lax.fori_loop(first, last, zeros, begin)

        @pl.when(begin < end)
        def _filled():
            lax.fori_loop(first, last, write, begin)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size, width), jnp.float32),
        grid=(blocks, width // slab),
        grid_names=("block", "slab"),
        kernel_name="embedding_gradient",
    )(order, token, bounds, begins, dout)


def _begins(keys: jax.Array, queries: jax.Array) -> jax.Array:
    """The first position in sorted `keys` that is no less than the query: one kernel, no loop."""
    begins = jnp.searchsorted(keys, queries, side="left", method="scan_unrolled")
    return begins.astype(jnp.int32)
