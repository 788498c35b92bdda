"""Token embedding, the table cut over "model" by vocabulary.

Row: out[t] is the table's row of tokens[t]: pure movement, no rounding.
Gradient: table rows sum over their tokens: each leaf of rows in row order, leaves by `pair_sum`.
Kernel (gradient): rows are a multiple of 128 wide.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import MODEL, Layout
from isojax.numerics.collectives import gather_rows, row_leaves
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum
from isojax.ops import weight
from isojax.ops.kernel import call
from isojax.ops.op import op
from isojax.ops.weight import Parameter
from pallas_kernels.rows_embedding import embedding_gradient


def _local_rows(tokens: jax.Array, size: int, layout: Layout) -> jax.Array:
    """Row of this rank's table for each token; `size` (out of range) if another rank has it."""
    if layout.model == 1:
        return tokens
    row = tokens - lax.axis_index(MODEL) * size
    return jnp.where((row >= 0) & (row < size), row, size)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embedding(policy, layout, tokens, table):
    values = weight.value(table)
    if layout.model == 1:
        return values[tokens]
    size = values.shape[0]
    found = values.at[_local_rows(tokens, size, layout)].get(mode="fill", fill_value=0)
    owner = tokens // size
    if layout.sequence_parallel:
        found = found.reshape(layout.model, -1, found.shape[1])
        found = lax.all_to_all(found, MODEL, split_axis=0, concat_axis=0)
        owner = owner.reshape(layout.model, -1)[lax.axis_index(MODEL)]
    else:
        found = lax.all_gather(found, MODEL)
    return found[owner, jnp.arange(owner.shape[0])]


def _embedding_forward(policy, layout, tokens, table):
    return _embedding(policy, layout, tokens, table), (tokens, table)


def _embedding_backward(policy, layout, saved, dout):
    tokens, table = saved
    size, width = weight.value(table).shape
    leaves = row_leaves(policy, layout)
    dout = gather_rows(dout, layout)
    rows = _local_rows(tokens, size, layout)
    if policy.evaluation == "mosaic":
        total = call(embedding_gradient, rows, dout, size=size, leaves=leaves)
        return None, weight.cotangent(table, total)
    rows = rows.reshape(leaves, -1)
    terms = dout.astype(jnp.float32).reshape(leaves, -1, width)
    leaf = jnp.arange(leaves)

    def add_row(
        i, total
    ):  # one row of every leaf: the targets are distinct, the order is the rows'
        return total.at[leaf, rows[:, i]].add(terms[:, i], mode="drop", unique_indices=True)

    zero = jnp.zeros((leaves, size, width), jnp.float32)
    total = lax.fori_loop(0, rows.shape[1], add_row, zero)
    return None, weight.cotangent(table, pair_sum(total))


_embedding.defvjp(_embedding_forward, _embedding_backward)


@op("embedding", static=("policy", "layout"))
def embedding(tokens: jax.Array, table: Parameter, *, policy: Policy, layout: Layout) -> jax.Array:
    """tokens int32 [T], table [V / model, H] -> this rank's rows [., H] of the residual stream."""
    return _embedding(policy, layout, tokens, table)
