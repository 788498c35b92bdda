"""Experts of a mixture: tokens travel to their experts, and what comes back combines in routing
order.

Row: out[t] depends on x[t], its experts and weights alone; no token is ever dropped.
Tree: each expert's linear maps by `tree_dot` (reference) or one float32 sum in the tensor cores; a
token's results combine by halving over its routing slots.
Rounding: operands in the compute dtype; gate and up stay float32 until their product is rounded; an
expert's result is rounded, its weighted sum over slots is float32 and rounded once.
Gradient: an expert's weights sum over its tokens in their order in the call (reference: in blocks
of `dot_width` tokens). Experts lie on all ranks of all mesh axes and every rank sees all tokens, so
no mesh cuts these sums: they need no leaves and are complete where they are.
"""

from functools import partial
from types import ModuleType

import jax

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.ops import experts_mosaic, experts_reference, weight
from isojax.ops.experts_travel import all_runs, even, everywhere, home, local, own_run
from isojax.ops.op import op
from isojax.ops.weight import Parameter


def _evaluation(policy: Policy) -> ModuleType:
    return experts_mosaic if policy.evaluation == "mosaic" else experts_reference


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(static, x, weights, experts, gate, up, down):
    return _evaluate(static, False, x, weights, experts, gate, up, down)[0]


def _evaluate(static, keep, x, weights, experts, gate, up, down):
    """(the op's result, what its gradient wants if it is to be kept)."""
    policy, layout = static
    by, values = _evaluation(policy), tuple(map(weight.value, (gate, up, down)))
    per_rank = values[0].shape[0]
    everyone = everywhere(even(x, 0, layout), layout)
    asked = everywhere(even(experts, -1, layout), layout)
    y, place, kept = by.forward(policy, keep, everyone, local(asked, per_rank, layout), *values)
    rows, take = home(y, place, asked, per_rank, layout)
    out = by.combine(rows, take, own_run(even(weights, 0, layout), layout))
    return all_runs(out, layout)[: x.shape[0]], (rows, take, kept)


def _experts_forward(static, *arrays):
    out, saved = _evaluate(static, True, *arrays)
    return out, (arrays, saved)


def _experts_backward(static, saved, dout):
    policy, layout = static
    (x, weights, experts, gate, up, down), (rows, take, kept) = saved
    by, values = _evaluation(policy), tuple(map(weight.value, (gate, up, down)))
    per_rank = values[0].shape[0]
    dweights = by.slot_dots(rows, take, own_run(dout, layout))
    asked = everywhere(experts, layout)
    dx, place, dws = by.backward(
        policy, kept, everywhere(x, layout), local(asked, per_rank, layout),
        everywhere(weights, layout), everywhere(dout, layout), *values,
    )  # fmt: skip
    dx = by.combine(*home(dx, place, asked, per_rank, layout))
    cotangents = map(weight.cotangent, (gate, up, down), dws)
    return all_runs(dx, layout), all_runs(dweights, layout), None, *cotangents


# a forward whose gradient is going to run it again keeps nothing
_experts.defvjp(_experts_forward, _experts_backward, optimize_remat=True)


@op("experts", static=("policy", "layout"))
def experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: Parameter,
    up: Parameter,
    down: Parameter,
    *,
    policy: Policy,
    layout: Layout,
) -> jax.Array:
    """sum over slots of weights * down(silu(gate(x)) * up(x)) -> [T, H].

    x [T, H] of the residual stream; weights float32, chosen int32 [T, k] from the router; gate, up
    [E / devices, H, I] and down [E / devices, I, H], experts dealt to all ranks in order.
    """
    return _experts((policy, layout), x, weights, chosen, gate, up, down)
