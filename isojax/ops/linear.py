"""Linear maps, cut over "model" by columns (no sum is cut) or by rows (the sum is a leaf tree).

Row: out[t] depends on x[t] and the weight alone.
Tree: a `product` over the inputs; where ranks cut the inputs, `leaves` equal leaves.
Rounding: operands are in the compute dtype, the sum is float32, the result is rounded once.
Gradient: by x, a product over outputs (in leaves, since columns are cut); by the weight, a sum over
tokens in leaves of rows, float32, of this rank's rows alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import MODEL, Layout
from isojax.numerics.collectives import (
    gather_rows,
    local_leaves,
    model_sum,
    row_leaves,
    stream_leaves,
    stream_sum,
)
from isojax.numerics.policy import Policy
from isojax.ops import kernel, weight
from isojax.ops.op import op
from isojax.ops.product import product
from isojax.ops.weight import Parameter
from pallas_kernels.matmul_columns import matmul_columns

# Rows up to which a launch for all weights of one input is worth it: a weight alone is then read in
# about the time that a kernel takes to start and end. With more rows its product fills the device.
FEW_ROWS = 256


def weight_gradient(x: jax.Array, dy: jax.Array, policy: Policy, layout: Layout) -> jax.Array:
    """x [T, K], dy [T, N] -> float32 [K, N], summed over this rank's leaves of rows."""
    return product(x, dy, policy, leaves=row_leaves(policy, layout), transpose_a=True)


def stream_gradient(x: jax.Array, dy: jax.Array, policy: Policy, layout: Layout) -> jax.Array:
    """`weight_gradient` of a weight that every model rank holds, by rows of the residual stream."""
    leaves = stream_leaves(policy, layout)
    return stream_sum(product(x, dy, policy, leaves=leaves, transpose_a=True), layout)


def _share_dtype(x: jax.Array, layout: Layout) -> jnp.dtype:
    """Of a rank's part of a sum over "model" ranks: a sum that is already whole is rounded."""
    return x.dtype if layout.model == 1 else jnp.dtype(jnp.float32)


def _own(w: jax.Array, copies: int, layout: Layout) -> jax.Array:
    """This rank's columns of a weight; with copies, w is whole and `copies` ranks take the same."""
    if copies == 1:
        return w
    width = w.shape[1] * copies // layout.model
    first = lax.axis_index(MODEL) // copies * width
    return lax.dynamic_slice_in_dim(w, first, width, axis=1)


def _counted(x: jax.Array, copies: int) -> jax.Array:
    """Of own columns x [..., N], the part that this rank stands for, neighbours having the rest."""
    if copies == 1:
        return x
    width = x.shape[-1] // copies
    first = lax.axis_index(MODEL) % copies * width
    return lax.dynamic_slice_in_dim(x, first, width, axis=x.ndim - 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _columns(static, x: jax.Array, ws: tuple[Parameter, ...]) -> tuple[jax.Array, ...]:
    copies, policy, layout = static
    own = [_own(weight.value(w), c, layout) for w, c in zip(ws, copies, strict=True)]
    x = gather_rows(x, layout)
    if policy.evaluation == "mosaic" and x.shape[0] <= FEW_ROWS:
        return kernel.call(matmul_columns, x, tuple(own))
    return tuple(product(x, w, policy, dtype=x.dtype) for w in own)


def _columns_forward(static, x, ws):
    return _columns(static, x, ws), (x, ws)


def _columns_backward(static, saved, dys):
    copies, policy, layout = static
    x, ws = saved
    parts = [
        (_counted(dy, c), _counted(_own(weight.value(w), c, layout), c))
        for w, dy, c in zip(ws, dys, copies, strict=True)
    ]
    leaves = min(
        local_leaves(w.shape[1] * layout.model, policy.leaves, layout.model, "column linear")
        for _, w in parts
    )
    # every leaf first adds up its share of all the weights
    part_dys, part_ws = zip(*parts, strict=True)
    dtype = _share_dtype(x, layout)
    dx = product(part_dys, part_ws, policy, leaves=leaves, transpose_b=True, dtype=dtype)
    dx = model_sum(dx, layout, x.dtype)
    x = gather_rows(x, layout)
    dws = []
    for w, dy, c in zip(ws, dys, copies, strict=True):
        dw = weight_gradient(x, dy, policy, layout)
        if c > 1:
            dw = jnp.concatenate(lax.all_gather(dw, MODEL)[::c], axis=1)
        dws.append(weight.cotangent(w, dw))
    return dx, tuple(dws)


_columns.defvjp(_columns_forward, _columns_backward)


@op("columns", static=("copies", "policy", "layout"))
def columns(
    x: jax.Array,
    ws: tuple[Parameter, ...],
    *,
    copies: tuple[int, ...] | None = None,
    policy: Policy,
    layout: Layout,
) -> tuple[jax.Array, ...]:
    """Several column-cut linear maps of one input.

    x [T, K] of the residual stream; ws: weights [K, N_i / model] -> outputs [T', N_i / model] for
    the rows T' that all model ranks have together.
    copies: for each weight, how many neighbouring ranks take the same columns of it (default 1);
    where it is more than 1, the weight is whole, [K, N_i], on every rank: heads that ranks
    outnumber.
    """
    return _columns((copies or (1,) * len(ws), policy, layout), x, ws)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(policy: Policy, layout: Layout, x: jax.Array, w: Parameter) -> jax.Array:
    leaves = local_leaves(x.shape[1] * layout.model, policy.leaves, layout.model, "row linear")
    dtype = _share_dtype(x, layout)
    share = product(x, weight.value(w), policy, leaves=leaves, dtype=dtype)
    return model_sum(share, layout, x.dtype)


def _rows_forward(policy, layout, x, w):
    return _rows(policy, layout, x, w), (x, w)


def _rows_backward(policy, layout, saved, dy):
    x, w = saved
    dy = gather_rows(dy, layout)
    dx = product(dy, weight.value(w), policy, transpose_b=True, dtype=x.dtype)
    return dx, weight.cotangent(w, weight_gradient(x, dy, policy, layout))


_rows.defvjp(_rows_forward, _rows_backward)


@op("rows", static=("policy", "layout"))
def rows(x: jax.Array, w: Parameter, *, policy: Policy, layout: Layout) -> jax.Array:
    """A row-cut linear map: x [T, K / model], w [K / model, N] -> rows [., N] of the stream."""
    return _rows(policy, layout, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stream_linear(policy: Policy, layout: Layout, x: jax.Array, w: Parameter) -> jax.Array:
    return product(x, weight.value(w), policy, dtype=x.dtype)


def _stream_linear_forward(policy, layout, x, w):
    return _stream_linear(policy, layout, x, w), (x, w)


def _stream_linear_backward(policy, layout, saved, dy):
    x, w = saved
    dx = product(dy, weight.value(w), policy, transpose_b=True, dtype=x.dtype)
    return dx, weight.cotangent(w, stream_gradient(x, dy, policy, layout))


_stream_linear.defvjp(_stream_linear_forward, _stream_linear_backward)


@op("stream_linear", static=("policy", "layout"))
def stream_linear(x: jax.Array, w: Parameter, *, policy: Policy, layout: Layout) -> jax.Array:
    """A linear map of the residual stream that no rank cuts: x [T, K], w [K, N] -> [T, N]."""
    return _stream_linear(policy, layout, x, w)
