"""Linear maps, cut over "model" by columns (no sum is cut) or by rows (the sum is a leaf tree).

Row: out[t] depends on x[t] and the weight alone.
Tree: `tree_dot` over the inputs; where ranks cut the inputs, `leaves` equal leaves and `pair_sum`.
Rounding: operands are in the compute dtype, the sum is float32, the result is rounded once.
Gradient: by x, a dot over outputs (a leaf tree, since columns are cut); by the weight, a sum over tokens in
batch leaves, float32, of this data rank alone.
"""

from functools import partial

import jax
import jax.numpy as jnp

from isojax.mesh import Layout
from isojax.numerics.collectives import local_leaves, model_sum
from isojax.numerics.policy import Policy
from isojax.numerics.trees import leaf_dot, pair_sum, tree_dot
from isojax.ops import weight
from isojax.ops.op import op
from isojax.ops.weight import Parameter


def weight_gradient(x: jax.Array, dy: jax.Array, policy: Policy, layout: Layout) -> jax.Array:
    """x [T, K], dy [T, N] -> float32 [K, N], summed over this data rank's batch leaves."""
    return leaf_dot(x.T, dy, policy.batch_leaves // layout.data, policy.dot_width)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _columns(
    policy: Policy, layout: Layout, x: jax.Array, ws: tuple[Parameter, ...]
) -> tuple[jax.Array, ...]:
    return tuple(tree_dot(x, weight.value(w), policy.dot_width).astype(x.dtype) for w in ws)


def _columns_forward(policy, layout, x, ws):
    return _columns(policy, layout, x, ws), (x, ws)


def _columns_backward(policy, layout, saved, dys):
    x, ws = saved
    values = [weight.value(w) for w in ws]
    leaves = min(
        local_leaves(w.shape[1] * layout.model, policy.leaves, layout.model, "column linear")
        for w in values
    )
    total = None  # [leaves, T, K]: every leaf first adds up its share of all the weights
    for w, dy in zip(values, dys, strict=True):
        n = w.shape[1] // leaves
        dy_leaf = jnp.moveaxis(dy.reshape(dy.shape[0], leaves, n), 1, 0)
        w_leaf = jnp.moveaxis(w.T.reshape(leaves, n, w.shape[0]), 0, 0)
        part = tree_dot(dy_leaf, w_leaf, policy.dot_width)
        total = part if total is None else total + part
    dx = model_sum(pair_sum(total), layout).astype(x.dtype)
    dws = tuple(
        weight.cotangent(w, weight_gradient(x, dy, policy, layout))
        for w, dy in zip(ws, dys, strict=True)
    )
    return dx, dws


_columns.defvjp(_columns_forward, _columns_backward)


@op("columns", static=("policy", "layout"))
def columns(
    x: jax.Array, ws: tuple[Parameter, ...], *, policy: Policy, layout: Layout
) -> tuple[jax.Array, ...]:
    """Several column-cut linear maps of one input.

    x [T, K], the same on every model rank; ws: weights [K, N_i / model] -> outputs [T, N_i / model].
    """
    return _columns(policy, layout, x, ws)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(policy: Policy, layout: Layout, x: jax.Array, w: Parameter) -> jax.Array:
    leaves = local_leaves(x.shape[1] * layout.model, policy.leaves, layout.model, "row linear")
    share = leaf_dot(x, weight.value(w), leaves, policy.dot_width)
    return model_sum(share, layout).astype(x.dtype)


def _rows_forward(policy, layout, x, w):
    return _rows(policy, layout, x, w), (x, w)


def _rows_backward(policy, layout, saved, dy):
    x, w = saved
    dx = tree_dot(dy, weight.value(w).T, policy.dot_width).astype(x.dtype)
    return dx, weight.cotangent(w, weight_gradient(x, dy, policy, layout))


_rows.defvjp(_rows_forward, _rows_backward)


@op("rows", static=("policy", "layout"))
def rows(x: jax.Array, w: Parameter, *, policy: Policy, layout: Layout) -> jax.Array:
    """A row-cut linear map: x [T, K / model], w [K / model, N] -> [T, N], the same on every rank."""
    return _rows(policy, layout, x, w)
