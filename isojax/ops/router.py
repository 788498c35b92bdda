"""The router of a mixture of experts: which experts a token takes, and with what weight.

Row: depends on x[t] and the weight alone. Ties go to the lowest expert.
Tree: logits by a `product` over features; the softmax's sum by halving over the chosen experts
(normalised) or over all of them.
Rounding: operands in the compute dtype, all else float32; the weights stay float32.
Gradient: by x a product over experts, which no rank cuts; by the weight a sum over tokens in leaves
of rows.
Kernels of the softmax: a sum over all experts adds those of a thread in order, then threads; their
number is a multiple of 32.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.policy import Policy
from isojax.numerics.trees import tree_sum
from isojax.ops import weight
from isojax.ops.kernel import call
from isojax.ops.linear import stream_gradient
from isojax.ops.op import op
from isojax.ops.product import product
from isojax.ops.weight import Parameter
from pallas_kernels import rows_softmax as kernels


def _softmax(logits: jax.Array, kernel: Callable[..., jax.Array], policy: Policy) -> jax.Array:
    if policy.evaluation == "mosaic":
        return call(kernel, logits)
    e = elementary.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return e / tree_sum(e)[..., None]


def _softmax_backward(p, dp, chosen, kernel, policy):
    """p (dp - sum(dp p)); chosen: dp and p where dp is not zero, all that the reference adds."""
    if policy.evaluation == "mosaic":
        return call(kernel, p, dp)
    return p * (dp - tree_sum(chosen[0] * chosen[1])[..., None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _router(static, x, w):
    return _router_forward(static, x, w)[0]


def _router_forward(static, x, w):
    top_k, normalise, policy, _ = static
    logits = product(x, weight.value(w), policy)
    chosen, experts = lax.top_k(logits, top_k)
    experts = experts.astype(jnp.int32)
    if normalise:
        weights = _softmax(chosen, kernels.softmax_chosen, policy)
    else:
        everyone = _softmax(logits, kernels.softmax, policy)
        weights = jnp.take_along_axis(everyone, experts, axis=-1)
    return (weights, experts), (x, w, logits, weights, experts)


def _router_backward(static, saved, cotangents):
    _, normalise, policy, layout = static
    x, w, logits, weights, experts = saved
    d = cotangents[0]
    rows = jnp.arange(x.shape[0])[:, None]
    at_chosen = jnp.zeros_like(logits).at[rows, experts]
    if normalise:
        kernel = kernels.softmax_chosen_backward
        dchosen = _softmax_backward(weights, d, (d, weights), kernel, policy)
        dlogits = at_chosen.set(dchosen, unique_indices=True)
    else:
        everyone = _softmax(logits, kernels.softmax, policy)
        dp = at_chosen.set(d, unique_indices=True)
        kernel = kernels.softmax_backward
        dlogits = _softmax_backward(everyone, dp, (d, weights), kernel, policy)
    dlogits = dlogits.astype(x.dtype)
    dx = product(dlogits, weight.value(w), policy, transpose_b=True, dtype=x.dtype)
    return dx, weight.cotangent(w, stream_gradient(x, dlogits, policy, layout))


_router.defvjp(_router_forward, _router_backward)


@op("router", static=("top_k", "normalise", "policy", "layout"))
def router(
    x: jax.Array, w: Parameter, *, top_k: int, normalise: bool, policy: Policy, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """x [T, H], w [H, E] -> (weights float32 [T, top_k], experts int32 [T, top_k]).

    normalise: the chosen experts' weights sum to one.
    """
    return _router((top_k, normalise, policy, layout), x, w)
