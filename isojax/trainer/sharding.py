"""Where a parameter's gradient, float32 master copy and optimizer state lie.

They are cut as the parameter is, and over the ranks with rows of their own besides (ZeRO), along an
axis that the parameter leaves whole. The axis is a function of the shape and the policy alone, so a
run may move between meshes.
"""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from isojax.mesh import CONTEXT, DATA, MODEL, ROWS, Layout
from isojax.models.config import ModelConfig
from isojax.models.params import parameters
from isojax.numerics.policy import Policy
from isojax.numerics.trees import pair_sum
from isojax.ops.op import op


def axis_names(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each of `ndim` axes, as tuples."""
    entries = tuple(spec) + (None,) * (ndim - len(spec))
    return tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in entries)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one tensor is cut, and the tree of its sums.

    shape: global. param: the spec of the parameter. axis: what `mesh.ROWS` cut besides, or None.
    state: the spec of gradient, master copy and optimizer state.
    leaves: (axis, leaves) of every axis that some mesh cuts, the same on every mesh.
    """

    shape: tuple[int, ...] = ()
    param: PartitionSpec = PartitionSpec()
    axis: int | None = None
    state: PartitionSpec = PartitionSpec()
    leaves: tuple[tuple[int, int], ...] = ()

    @property
    def owned(self) -> bool:
        """Whether `ROWS` cut the parameter itself: its gradient is complete on its owner."""
        return any(DATA in names for names in axis_names(self.param, len(self.shape)))


def place(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    policy: Policy,
    finest: PartitionSpec | None = None,
) -> Placement:
    """Cut over `ROWS` the longest whole axis that `policy.row_leaves` divides, if any.

    finest: the spec with every axis that some mesh cuts, where `spec` leaves one whole because the
    mesh has more ranks than it has heads.
    """
    names, most = axis_names(spec, len(shape)), axis_names(finest or spec, len(shape))
    axis = None
    if not any(DATA in n for n in names):
        free = [i for i, n in enumerate(most) if not n and shape[i] % policy.row_leaves == 0]
        axis = max(free, key=lambda i: (shape[i], -i), default=None)

    def with_rows(names: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
        return [ROWS if i == axis else n for i, n in enumerate(names)]

    parts = {DATA: policy.batch_leaves, CONTEXT: policy.context_leaves, MODEL: policy.leaves}
    leaves = tuple(
        (i, math.gcd(shape[i], math.prod(parts[name] for name in n)))
        for i, n in enumerate(with_rows(most))
        if n
    )
    state = PartitionSpec(*(n[0] if len(n) == 1 else (n or None) for n in with_rows(names)))
    return Placement(tuple(shape), spec, axis, state, leaves)


def placements(model: ModelConfig, policy: Policy, layout: Layout) -> Any:
    """`place` for every parameter of a model."""
    return jax.tree.map(
        lambda p, finest: place(p.shape, p.spec, policy, finest.spec),
        parameters(model, policy, layout),
        parameters(model, policy, Layout()),
    )


@op("reduce_gradient", static=("placement", "layout"))
def reduce_gradient(partial: jax.Array, *, placement: Placement, layout: Layout) -> jax.Array:
    """Finish the leaf tree of a gradient over the ranks with rows of their own: this rank's block
    of `placement.state`.

    partial: float32, the parameter's local shape, summed over this rank's leaves of rows. Each rank
    receives every rank's share of its own block, in rank order, and adds them by `pair_sum`.
    """
    if placement.owned or layout.row_ranks == 1:
        return partial
    if placement.axis is None:
        return pair_sum(lax.all_gather(partial, ROWS))
    axis, shape = placement.axis, partial.shape
    blocks = partial.reshape(*shape[:axis], layout.row_ranks, -1, *shape[axis + 1 :])
    return pair_sum(lax.all_to_all(blocks, ROWS, split_axis=axis, concat_axis=0))


def gather(block: jax.Array, placement: Placement, layout: Layout) -> jax.Array:
    """A rank's block of `placement.state` -> its block of `placement.param` (movement only)."""
    if placement.axis is None or layout.row_ranks == 1:
        return block
    return lax.all_gather(block, ROWS, axis=placement.axis, tiled=True)


def scatter(block: jax.Array, placement: Placement, layout: Layout) -> jax.Array:
    """A rank's block of `placement.param` -> its block of `placement.state` (movement only)."""
    if placement.axis is None or layout.row_ranks == 1:
        return block
    size = block.shape[placement.axis] // layout.row_ranks
    return lax.dynamic_slice_in_dim(block, lax.axis_index(ROWS) * size, size, placement.axis)
