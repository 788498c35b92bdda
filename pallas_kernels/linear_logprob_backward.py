"""Backward of the log-probability over a large vocabulary: logits recomputed, leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear_logprob import Gradients, logit_gradient
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul_core import leaf_tree


def linear_logprob_backward(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    gradients: Gradients,
    *,
    leaves: int = 1,
    batch_leaves: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Gradients by the hidden states and the head.

    A leaf's logit gradient, [M, V / leaves] bfloat16, is the only large intermediate. The hidden
    gradient sums a leaf's columns upwards and leaves in a balanced binary tree, so a rank that owns
    a subtree of leaves returns that subtree's partial sum. The weight gradient sums rows upwards
    inside a batch leaf and batch leaves in a balanced binary tree.

    Args:
      hidden: [M, K] bfloat16.
      lm_head: [K, V] bfloat16, the columns of this rank's leaves.
      targets: [M] int32, columns of `lm_head`, or outside [0, V).
      inverse_temperature: [M] float32.
      gradients: of all rows.
      leaves: vocabulary leaves of this rank, a power of two.
      batch_leaves: equal parts of the rows, a power of two.

    Returns:
      (hidden gradient [M, K], lm_head gradient [K, V]), both float32.

    Raises:
      ValueError: as `logit_gradient` and `matmul` do.
    """
    width = lm_head.shape[1] // leaves
    index = iter(range(leaves))
    d_head = jnp.zeros(lm_head.shape, jnp.float32)

    def leaf():
        nonlocal d_head, hidden
        first = next(index) * width
        columns = lax.slice_in_dim(lm_head, first, first + width, axis=1)
        d_hidden, d_columns = _leaf(
            hidden, columns, targets - first, inverse_temperature, gradients, batch_leaves
        )
        # One leaf after the other: the large intermediate must not exist twice.
        hidden, d_columns, d_hidden = lax.optimization_barrier((hidden, d_columns, d_hidden))
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_columns, first, axis=1)
        return d_hidden

    d_hidden = leaf_tree(leaf, leaves)
    return d_hidden, d_head


@functools.partial(jax.jit, static_argnums=5)  # the leaves share three kernels
def _leaf(hidden, columns, targets, inverse_temperature, gradients, batch_leaves):
    """The gradients of `linear_logprob_backward` from one leaf's columns alone."""
    d_logits = logit_gradient(hidden, columns, targets, inverse_temperature, gradients)
    d_columns = matmul(
        hidden, d_logits, transpose_a=True, leaves=batch_leaves, out_dtype=jnp.float32
    )
    return matmul(d_logits, columns, transpose_b=True, out_dtype=jnp.float32), d_columns
