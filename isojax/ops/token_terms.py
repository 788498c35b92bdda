"""What a row op's weight gradient is summed from: the rows' terms, by leaves of rows.

Tree: reference `token_leaves`; in the kernel the rows of a block of 64 in order, blocks in order.
The tree that joins the leaves is the caller's.
"""

import jax

from isojax.numerics.policy import Policy
from isojax.numerics.trees import token_leaves
from isojax.ops.kernel import call
from pallas_kernels.rows_token_sum import token_sum


def leaf_sums(terms: jax.Array, leaves: int, policy: Policy) -> jax.Array:
    """Sum float32 terms [T, ...] over the tokens of each leaf -> float32 [leaves, ...]."""
    if policy.evaluation == "reference":
        return token_leaves(terms, leaves)
    sums = call(token_sum, terms.reshape(terms.shape[0], -1), leaves=leaves)
    return sums.reshape(leaves, *terms.shape[1:])
