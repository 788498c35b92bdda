"""AdamW on float32 master weights, on every rank of the mesh at once (inside `shard_map`).

optax computes the elementwise update. The global norm is a sum and has a tree of its own: the
squares of a tensor by leaves along the axes that a mesh may cut, then the tensors in the order of
the tree.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from isojax.mesh import CONTEXT, DATA, MODEL, Layout
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum, tree_sum, tree_sum_by_passes
from isojax.ops.op import op
from isojax.trainer.sharding import Placement, axis_names, gather, scatter


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Hyperparameters (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    weight_decay: of matrices; vectors (norms, biases, decay rates) are not decayed.
    max_grad_norm: gradients of a larger global norm are scaled down to it; 0 never scales.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def transformation(self) -> optax.GradientTransformation:
        """What is left of AdamW in optax, without learning rate and clipping."""
        return optax.chain(
            optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon),
            optax.add_decayed_weights(self.weight_decay, mask=decayed),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """learning_rate: after the warm-up. warmup_steps: steps over which the rate rises linearly."""

    learning_rate: float = 1e-6
    warmup_steps: int = 0

    def rate(self, step: int) -> np.float32:
        """Learning rate of optimizer step `step`, counted from 0."""
        share = min((step + 1) / max(self.warmup_steps, 1), 1.0)
        return np.float32(self.learning_rate * share)


def decayed(params: Any) -> Any:
    """Whether each parameter is decayed: those of two axes or more, not counting layers."""

    def is_matrix(path: tuple, p: jax.Array) -> bool:
        stacked = getattr(path[0], "key", None) == "layers"
        return p.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def like_state(adamw: AdamW, placements: Any) -> Any:
    """The optimizer state with a Placement for each of its arrays."""
    shapes = jax.tree.map(lambda at: jax.ShapeDtypeStruct(at.shape, jnp.float32), placements)
    transformation = adamw.transformation()
    return optax.tree_map_params(
        transformation,
        lambda _, placement: placement,
        jax.eval_shape(transformation.init, shapes),
        placements,
        transform_non_params=lambda _: Placement(),
    )


def count(state: Any) -> jax.Array:
    """How many updates an optimizer state has seen, int32."""
    return state[0].count


def init(adamw: AdamW, params: Any, placements: Any, layout: Layout) -> tuple[Any, Any]:
    """Parameters -> (float32 master weights, optimizer state), this rank's blocks of each."""
    master = jax.tree.map(
        lambda at, p: scatter(p.astype(jnp.float32), at, layout), placements, params
    )
    return master, adamw.transformation().init(master)


@op("square_sum", static=("placement", "policy", "layout"))
def square_sum(
    block: jax.Array, *, placement: Placement, policy: Policy, layout: Layout
) -> jax.Array:
    """Sum of squares of a tensor cut as `placement.state` -> float32 scalar, the same on every
    rank.

    Axes that a mesh may cut are viewed as leaves of equal length; inside a leaf every axis is
    summed by halving, the first axis first; the grid of leaves is gathered and summed by pairs,
    axis by axis.
    """
    ranks = {DATA: layout.data, CONTEXT: layout.context, MODEL: layout.model}
    over = axis_names(placement.state, block.ndim)
    leaves = dict(placement.leaves)
    grid = block * block
    kept = 0  # the leaf axes so far stand in front
    for axis in range(block.ndim):
        if axis not in leaves:
            grid = tree_sum_by_passes(grid, kept)
            continue
        own = leaves[axis] // math.prod(ranks[name] for name in over[axis])
        if own == 0:
            raise ValueError(f"mesh {layout} cuts axis {axis} of {placement.shape} too finely")
        grid = grid.reshape(*grid.shape[:kept], own, -1, *grid.shape[kept + 1 :])
        grid = tree_sum_by_passes(grid, kept + 1)
        kept += 1
    for i, axis in enumerate(leaves):
        for name in reversed(over[axis]):
            if ranks[name] > 1:
                grid = lax.all_gather(grid, name, axis=i, tiled=True)
    while grid.ndim:
        grid = pair_sum(grid)
    return grid


@op("global_norm")
def global_norm(squares: tuple[jax.Array, ...]) -> jax.Array:
    """Square root of the tensors' sums of squares, added by halving in the order of the tree."""
    return jnp.sqrt(tree_sum(jnp.stack(squares)))


def update(
    adamw: AdamW,
    gradients: Any,
    master: Any,
    state: Any,
    params: Any,
    rate: jax.Array,
    *,
    placements: Any,
    policy: Policy,
    layout: Layout,
) -> tuple[Any, Any, Any, jax.Array]:
    """One optimizer step at learning rate `rate`, a float32 scalar.

    Returns (master, state, params in their dtypes, the gradients' global norm).

    A norm that is not finite leaves everything as it was; the caller sees it in the norm.
    """
    squares = jax.tree.map(
        lambda at, g: square_sum(g, placement=at, policy=policy, layout=layout),
        placements,
        gradients,
    )
    norm = global_norm(tuple(jax.tree.leaves(squares)))
    if adamw.max_grad_norm:
        shrink = jnp.minimum(1.0, adamw.max_grad_norm / norm)
        gradients = jax.tree.map(lambda g: g * shrink, gradients)
    changes, new_state = adamw.transformation().update(gradients, state, master)
    changes = jax.tree.map(lambda change: -rate * change, changes)
    finite = jnp.isfinite(norm)
    keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    new_state = jax.tree.map(keep, new_state, state)
    new_master = jax.tree.map(keep, optax.apply_updates(master, changes), master)
    new_params = jax.tree.map(
        lambda at, m, p: gather(m.astype(p.dtype), at, layout), placements, new_master, params
    )
    return new_master, new_state, new_params, norm
