"""Where a parameter's gradient, float32 master copy and optimizer state lie.

They are cut as the parameter is, and over "data" besides (ZeRO), along an axis that the parameter
leaves whole. The axis is a function of the shape and the policy alone, so a run may move between
meshes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from isojax.mesh import DATA, MODEL, Layout
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum
from isojax.ops.op import op


def axis_names(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each of `ndim` axes, as tuples."""
    entries = tuple(spec) + (None,) * (ndim - len(spec))
    return tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in entries)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one tensor is cut.

    shape: global. param: the spec of the parameter. axis: what "data" cuts besides, or None.
    state: the spec of gradient, master copy and optimizer state. copies: how often each head stands
    in the last axis (more than once where model ranks outnumber key and value heads); head: its
    width.
    """

    shape: tuple[int, ...]
    param: PartitionSpec
    axis: int | None
    state: PartitionSpec
    copies: int = 1
    head: int = 1

    @property
    def owned(self) -> bool:
        """Whether "data" cuts the parameter itself: its gradient is complete on its owner."""
        return any(DATA in names for names in axis_names(self.param, len(self.shape)))


def place(
    shape: tuple[int, ...], spec: PartitionSpec, policy: Policy, copies: int = 1, head: int = 1
) -> Placement:
    """Cut over "data" the longest whole axis that `policy.batch_leaves` divides, if any."""
    names = axis_names(spec, len(shape))
    axis = None
    if not any(DATA in n for n in names):
        free = [i for i, n in enumerate(names) if not n and shape[i] % policy.batch_leaves == 0]
        axis = max(free, key=lambda i: (shape[i], -i), default=None)
    state = [n[0] if len(n) == 1 else (n or None) for n in names]
    if axis is not None:
        state[axis] = DATA
    return Placement(tuple(shape), spec, axis, PartitionSpec(*state), copies, head)


def placements(parameters: Any, policy: Policy) -> Any:
    """`place` for a tree of `isojax.models.params.Parameter`."""
    return jax.tree.map(lambda p: place(p.shape, p.spec, policy, p.copies, p.head), parameters)


@op("reduce_gradient", static=("placement", "layout"))
def reduce_gradient(partial: jax.Array, *, placement: Placement, layout: Layout) -> jax.Array:
    """Finish the leaf tree of a gradient over the data ranks: this rank's block of
    `placement.state`.

    partial: float32, the parameter's local shape, summed over this rank's batch leaves. Each rank
    receives every rank's share of its own block, in rank order, and adds them by `pair_sum`.
    """
    if placement.owned or layout.data == 1:
        return partial
    if placement.axis is None:
        return pair_sum(lax.all_gather(partial, DATA))
    axis, shape = placement.axis, partial.shape
    blocks = partial.reshape(*shape[:axis], layout.data, -1, *shape[axis + 1 :])
    return pair_sum(lax.all_to_all(blocks, DATA, split_axis=axis, concat_axis=0))


def gather(block: jax.Array, placement: Placement, layout: Layout) -> jax.Array:
    """A rank's block of `placement.state` -> its block of `placement.param` (movement only)."""
    if placement.axis is None or layout.data == 1:
        return block
    return lax.all_gather(block, DATA, axis=placement.axis, tiled=True)


def scatter(block: jax.Array, placement: Placement, layout: Layout) -> jax.Array:
    """A rank's block of `placement.param` -> its block of `placement.state` (movement only)."""
    if placement.axis is None or layout.data == 1:
        return block
    size = block.shape[placement.axis] // layout.data
    return lax.dynamic_slice_in_dim(block, lax.axis_index(DATA) * size, size, placement.axis)


def leaf_axes(placement: Placement, policy: Policy) -> tuple[tuple[int, int], ...]:
    """(axis, leaves) of every axis of `placement.state` that a mesh may cut.

    Leaves: the largest power of two that divides the axis, up to what its mesh axes may be cut
      into.
    """
    most = {DATA: policy.batch_leaves, MODEL: policy.leaves}
    found = []
    for axis, names in enumerate(axis_names(placement.state, len(placement.shape))):
        if names:
            cap = 1
            for name in names:
                cap *= most[name]
            size = placement.shape[axis]
            if axis == len(placement.shape) - 1:
                size //= placement.copies
            found.append((axis, min(cap, size & -size)))
    return tuple(found)


def stored(at: Placement) -> Placement:
    """How a checkpoint places a tensor's state: each head once, uncut where heads were copied."""
    if at.copies == 1:
        return at
    spec = PartitionSpec(*tuple(at.state)[:-1], None)
    return Placement((*at.shape[:-1], at.shape[-1] // at.copies), spec, None, spec)


def distinct(at: Placement, x: jax.Array) -> jax.Array:
    """Each head once, in the global view."""
    if at.copies == 1:
        return x
    heads = x.reshape(*x.shape[:-1], -1, at.copies, at.head)
    return heads[..., 0, :].reshape(*x.shape[:-1], -1)


def with_copies(at: Placement, x: jax.Array) -> jax.Array:
    """Each head as often as the mesh holds it, in the global view."""
    if at.copies == 1:
        return x
    heads = x.reshape(*x.shape[:-1], -1, at.head)
    return jnp.repeat(heads, at.copies, axis=-2).reshape(*x.shape[:-1], -1)
