"""RMS norms.

Row: out[t] (out[t, head]) depends on x[t] (x[t, head]) and the weight alone.
Tree: the sum of squares over the last axis is `tree_sum` (halving); in the kernels the elements of
a thread in order, then threads by halving, which the width alone decides.
Rounding: float32 inside, the result is rounded once to the input's dtype.
Gradient: by rows, the formula of the normalisation with the same tree; by the weight, a sum over
the tokens of a leaf of rows, then over heads in leaves that "model" ranks may share, then over
leaves of rows. The kernels give the rows' terms of the latter and sum the rows of a leaf.
Kernels: widths are multiples of 32, beyond 2048 of 128.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import head_sum, row_leaves, stream_leaves, stream_sum
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, tree_sum
from isojax.ops import weight
from isojax.ops.kernel import call
from isojax.ops.op import op
from isojax.ops.token_terms import leaf_sums
from isojax.ops.weight import Parameter
from pallas_kernels import rows_norm as kernels


def _inverse_rms(x: jax.Array, epsilon: float) -> jax.Array:
    return jax.lax.rsqrt(tree_sum(x * x)[..., None] / x.shape[-1] + epsilon)


def _scale(w: Parameter, zero_centered: bool) -> jax.Array:
    scale = weight.value(w).astype(jnp.float32)
    return 1.0 + scale if zero_centered else scale


def _normalise_backward(x: jax.Array, dn: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """For n = x / rms(x), all float32: (n, dx)."""
    r = _inverse_rms(x, epsilon)
    n = x * r
    return n, r * (dn - n * (tree_sum(dn * n)[..., None] / x.shape[-1]))


def _by_rows(kernel: Callable[..., Any], *inputs: jax.Array, **options: Any) -> Any:
    """A kernel of rows [R, D] on arrays [..., D]; w [D] passes as it is."""
    shape = inputs[0].shape
    rows = [x if x.ndim == 1 else x.reshape(-1, shape[-1]) for x in inputs]
    return jax.tree.map(lambda y: y.reshape(shape), call(kernel, *rows, **options))


def _weight_sum(terms: jax.Array, policy: Policy, layout: Layout, heads: int | None) -> jax.Array:
    """[T, D] of the residual stream, or [T, local heads, D] with `heads` in all, -> float32 [D]."""
    if heads is None:
        leaves = leaf_sums(terms, stream_leaves(policy, layout), policy)
        return stream_sum(pair_sum(leaves), layout)
    # heads before leaves of rows: "data" ranks hold only some of those
    total = leaf_sums(terms, row_leaves(policy, layout), policy)
    return pair_sum(head_sum(jnp.moveaxis(total, 1, 0), heads, policy, layout))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(static, x, w):
    epsilon, zero_centered, _, policy, _ = static
    if policy.evaluation == "mosaic":
        options = {"epsilon": epsilon, "zero_centered": zero_centered}
        return _by_rows(kernels.rms_norm, x, weight.value(w), **options)
    y = x.astype(jnp.float32)
    return (y * _inverse_rms(y, epsilon) * _scale(w, zero_centered)).astype(x.dtype)


def _rms_norm_forward(static, x, w):
    return _rms_norm(static, x, w), (x, w)


def _rms_norm_backward(static, saved, dy):
    epsilon, zero_centered, heads, policy, layout = static
    x, w = saved
    if policy.evaluation == "mosaic":
        options = {"epsilon": epsilon, "zero_centered": zero_centered}
        dx, terms = _by_rows(kernels.rms_norm_backward, x, weight.value(w), dy, **options)
    else:
        dy = dy.astype(jnp.float32)
        n, dx = _normalise_backward(x.astype(jnp.float32), dy * _scale(w, zero_centered), epsilon)
        terms = dy * n
    dw = _weight_sum(terms, policy, layout, heads)
    return dx.astype(x.dtype), weight.cotangent(w, dw)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@op("rms_norm", static=("epsilon", "zero_centered", "heads", "policy", "layout"))
def rms_norm(
    x: jax.Array,
    w: Parameter,
    *,
    epsilon: float,
    zero_centered: bool,
    heads: int | None = None,
    policy: Policy,
    layout: Layout,
) -> jax.Array:
    """x / rms(x) * w, or * (1 + w) if `zero_centered`, over the last axis.

    x [T, D], or [T, local heads, D] with `heads` heads on all model ranks together; w [D].
    Source: Zhang and Sennrich, arXiv 1910.07467.

    Raises:
      ValueError: for a width that the kernels do not take.
    """
    return _rms_norm((epsilon, zero_centered, heads, policy, layout), x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_rms_norm(static, x, gate, w):
    epsilon, _, policy, _ = static
    if policy.evaluation == "mosaic":
        return _by_rows(kernels.gated_rms_norm, x, gate, weight.value(w), epsilon=epsilon)
    y = x.astype(jnp.float32)
    y = y * _inverse_rms(y, epsilon) * _scale(w, False)
    return (y * elementary.silu(gate.astype(jnp.float32))).astype(x.dtype)


def _gated_rms_norm_forward(static, x, gate, w):
    return _gated_rms_norm(static, x, gate, w), (x, gate, w)


def _gated_rms_norm_backward(static, saved, dy):
    epsilon, heads, policy, layout = static
    x, gate, w = saved
    if policy.evaluation == "mosaic":
        dx, dgate, terms = _by_rows(
            kernels.gated_rms_norm_backward, x, gate, weight.value(w), dy, epsilon=epsilon
        )
    else:
        dy, z = dy.astype(jnp.float32), gate.astype(jnp.float32)
        scale, sigmoid = _scale(w, False), elementary.sigmoid(z)
        opened = dy * (z * sigmoid)
        n, dx = _normalise_backward(x.astype(jnp.float32), opened * scale, epsilon)
        dgate = dy * n * scale * (sigmoid * (1.0 + z * (1.0 - sigmoid)))
        terms = opened * n
    dw = _weight_sum(terms, policy, layout, heads)
    return dx.astype(x.dtype), dgate.astype(gate.dtype), weight.cotangent(w, dw)


_gated_rms_norm.defvjp(_gated_rms_norm_forward, _gated_rms_norm_backward)


@op("gated_rms_norm", static=("epsilon", "heads", "policy", "layout"))
def gated_rms_norm(
    x: jax.Array,
    gate: jax.Array,
    w: Parameter,
    *,
    epsilon: float,
    heads: int,
    policy: Policy,
    layout: Layout,
) -> jax.Array:
    """x / rms(x) * w * silu(gate) over the last axis: x, gate [T, local heads, D]; w [D].

    Raises:
      ValueError: for a width that the kernels do not take.
    """
    return _gated_rms_norm((epsilon, heads, policy, layout), x, gate, w)
