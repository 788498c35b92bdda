"""Gradient of an embedding table: rows of one token add up in order, batch leaves in a tree."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves, leaf_tree
from pallas_kernels.rows_token_sum import SLAB, ordered_sum


def embedding_gradient(tokens: jax.Array, dout: jax.Array, size: int, leaves: int) -> jax.Array:
    """Sum of dout's rows by token: in a batch leaf in row order, leaves in a balanced binary tree.

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
    token = jnp.where((tokens >= 0) & (tokens < size), tokens, size).astype(jnp.int32)
    order = jnp.argsort(token, stable=True).astype(jnp.int32)
    token = token[order]
    # Where the rows of (token, leaf) begin among the sorted ones, for the token of every position.
    key = token * leaves + order // (rows // leaves)
    bounds = jnp.searchsorted(key, token[:, None] * leaves + jnp.arange(leaves + 1), side="left")
    first = jnp.arange(rows) == bounds[:, 0]

    def body(order_gmem, bounds_gmem, first_gmem, dout_gmem, out):
        position, span = lax.axis_index("position"), pl.ds(lax.axis_index("slab") * SLAB, SLAB)

        @pl.when(first_gmem[position] > 0)
        def _token():
            index = iter(range(leaves))

            def leaf():
                i = next(index)
                begin, end = bounds_gmem[position, i], bounds_gmem[position, i + 1]
                return ordered_sum(
                    lambda j: dout_gmem[order_gmem[begin + j], span].astype(jnp.float32),
                    end - begin,
                    jnp.zeros((SLAB,), jnp.float32),
                )

            out[position, span] = leaf_tree(leaf, leaves)

    sums = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        grid=(rows, width // SLAB),
        grid_names=("position", "slab"),
        kernel_name="embedding_gradient",
    )(order, bounds.astype(jnp.int32), first.astype(jnp.int32), dout)
    target = jnp.where(first, token, size)
    zero = jnp.zeros((size, width), jnp.float32)
    return zero.at[target].set(sums, mode="drop")
