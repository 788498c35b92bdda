"""Ordered sums over tokens: what a weight gradient of a row op is made of.

    out[leaf] = blocks of 64 rows, in order, of ( rows of the block, in order )

Leaves are equal contiguous parts of the rows. The tree that joins them is the caller's, for ranks
may own some leaves each.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import check_leaves

BLOCK = 64  # rows of a block
SLAB = 128  # columns of a step: one a thread
_UNROLL = 8


def token_sum(x: jax.Array, leaves: int) -> jax.Array:
    """Sum x [T, N] float32 over the rows of each leaf -> [leaves, N] float32.

    Raises:
      ValueError: for another dtype, or leaves that are not a power of two or do not divide T.
    """
    rows, width = x.shape
    if x.dtype != jnp.float32:
        raise ValueError(f"terms must be float32, not {x.dtype}")
    check_leaves(rows, leaves)
    length = rows // leaves
    blocks = pl.cdiv(length, BLOCK)
    padded = width + -width % SLAB

    def body(x_gmem, out):
        leaf, block = lax.axis_index("leaf"), lax.axis_index("block")
        span = pl.ds(lax.axis_index("slab") * SLAB, SLAB)
        first = leaf * length + block * BLOCK
        count = lax.min(length - block * BLOCK, BLOCK)
        out[leaf * blocks + block, span] = ordered_sum(
            lambda i: x_gmem[first + i, span], count, jnp.zeros((SLAB,), jnp.float32)
        )

    partial = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((leaves * blocks, padded), jnp.float32),
        grid=(leaves, blocks, padded // SLAB),
        grid_names=("leaf", "block", "slab"),
        kernel_name="token_sum",
    )(jnp.pad(x, ((0, 0), (0, padded - width))))
    return join_blocks(partial, leaves)[:, :width]


def join_blocks(partial: jax.Array, leaves: int) -> jax.Array:
    """Sums [leaves * blocks, N] float32 of blocks -> [leaves, N], in order; N % 128 == 0."""
    blocks, width = partial.shape[0] // leaves, partial.shape[1]

    def body(partial_gmem, out):
        leaf, span = lax.axis_index("leaf"), pl.ds(lax.axis_index("slab") * SLAB, SLAB)
        zero = jnp.zeros((SLAB,), jnp.float32)
        out[leaf, span] = ordered_sum(lambda i: partial_gmem[leaf * blocks + i, span], blocks, zero)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((leaves, width), jnp.float32),
        grid=(leaves, width // SLAB),
        grid_names=("leaf", "slab"),
        kernel_name="token_sum_blocks",
    )(partial)


def ordered_sum(term, count, zero: jax.Array) -> jax.Array:
    """term(0) + term(1) + ... in this order, from `zero`; a group of loads is started together."""

    def several(i, total):
        terms = [term(i * _UNROLL + j) for j in range(_UNROLL)]
        for value in terms:
            total = total + value
        return total

    whole = count // _UNROLL
    total = lax.fori_loop(0, whole, several, zero)
    return lax.fori_loop(whole * _UNROLL, count, lambda i, total: total + term(i), total)
