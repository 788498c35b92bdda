"""Log-probability of a token under the language-model head, without the [T, V] array.

Row: depends on hidden[t], the head and the token's own temperature, target and threshold alone.
Tree: a logit by a `product` over features. The vocabulary is cut into `vocab_leaves` equal leaves,
a leaf into blocks of `vocab_block` logits, which join a log-sum-exp in order (a block's exp are
added by halving in the reference, in the order of a warpgroup's registers in the kernels); leaves
combine by neighbours, so ranks that hold vocabulary shards finish the same tree.
Rounding: operands in the compute dtype; logits, their product with the inverse temperature and all
sums float32.
Gradient: logits are recomputed block by block and rounded to the compute dtype as gradients; by
hidden a dot within blocks, blocks in order, leaves by `pair_sum`; by the head a sum over tokens in
leaves of rows.

Two log-probabilities come out: over the full vocabulary, and over the kept set {v: z[v] >=
threshold} of scaled logits z. Truncated sampling (top-k, top-p, min-p) keeps exactly such a set,
and since logits are bitwise reproducible its threshold is all that has to be stored.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from isojax.mesh import MODEL, Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import (
    all_context_rows,
    context_part,
    gather_rows,
    local_leaves,
    model_sum,
    row_leaves,
)
from isojax.numerics.policy import Policy
from isojax.numerics.trees import leaf_dot, pair_sum, tree_dot, tree_sum
from isojax.ops import kernel, weight
from isojax.ops.op import op
from isojax.ops.product import product
from isojax.ops.weight import Parameter
from pallas_kernels import linear_logprob as kernels
from pallas_kernels.linear_logprob import Logprobs
from pallas_kernels.linear_logprob_backward import linear_logprob_backward

_LINE = 64  # columns of the head that lie side by side in a kernel's shared memory


class Statistics(NamedTuple):
    """Log-sum-exp in the making, float32 [..., T]: maximum, sum of exp, the same over the kept set,
    and the target's scaled logit (-inf until met).
    """

    maximum: jax.Array
    total: jax.Array
    kept: jax.Array
    target: jax.Array


def _absorb(s: Statistics, z: jax.Array, hit: jax.Array, threshold: jax.Array) -> Statistics:
    """Add a block z [..., T, B] of scaled logits, -inf where there is none; hit: the target."""
    maximum = jnp.maximum(s.maximum, jnp.max(z, axis=-1))
    old = elementary.exp(s.maximum - maximum)
    e = elementary.exp(z - maximum[..., None])
    kept = jnp.where(z >= threshold[:, None], e, 0.0)
    target = jnp.max(jnp.where(hit, z, -jnp.inf), axis=-1)
    return Statistics(
        maximum,
        s.total * old + tree_sum(e),
        s.kept * old + tree_sum(kept),
        jnp.maximum(s.target, target),
    )


def _merge(a: Statistics, b: Statistics) -> Statistics:
    maximum = jnp.maximum(a.maximum, b.maximum)
    left, right = elementary.exp(a.maximum - maximum), elementary.exp(b.maximum - maximum)
    return Statistics(
        maximum,
        a.total * left + b.total * right,
        a.kept * left + b.kept * right,
        jnp.maximum(a.target, b.target),
    )


def _finish(s: Statistics, layout: Layout) -> Statistics:
    """[local leaves, T] on every rank -> [T], the same on every rank."""

    def tree(s: Statistics) -> Statistics:
        while s.maximum.shape[0] > 1:
            s = _merge(Statistics(*(x[0::2] for x in s)), Statistics(*(x[1::2] for x in s)))
        return Statistics(*(x[0] for x in s))

    s = tree(s)
    if layout.model == 1:
        return s
    return tree(Statistics(*(lax.all_gather(x, MODEL) for x in s)))


class _Shard(NamedTuple):
    """How this rank's vocabulary falls into leaves and blocks."""

    size: int
    leaves: int
    leaf: int
    block: int
    blocks: int


def _shard(size: int, policy: Policy, layout: Layout) -> _Shard:
    """How `size` columns of this rank are cut.

    Raises:
      ValueError: if ranks do not divide the leaves, or the kernels do not take the sizes.
    """
    whole, unit = size * layout.model, 1
    if policy.evaluation == "mosaic":
        unit = _LINE
        if policy.vocab_block != kernels.BLOCK or whole % _LINE:
            raise ValueError(
                f"the Hopper evaluation reduces blocks of {kernels.BLOCK} logits and cuts the "
                f"vocabulary into leaves of whole {_LINE}s: policy.vocab_block is "
                f"{policy.vocab_block}, the vocabulary {whole}"
            )
    leaves = local_leaves(whole // unit, policy.vocab_leaves, layout.model, "vocabulary")
    leaf = size // leaves
    block = min(policy.vocab_block, leaf)
    return _Shard(size, leaves, leaf, block, -(-leaf // block))


def _split(w: jax.Array, shard: _Shard) -> jax.Array:
    """[..., V] -> [blocks, leaves, ..., block]; zeros fill the last block of a leaf."""
    w = w.reshape(*w.shape[:-1], shard.leaves, shard.leaf)
    width = shard.blocks * shard.block
    w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, width - shard.leaf)])
    w = w.reshape(*w.shape[:-1], shard.blocks, shard.block)
    return jnp.moveaxis(jnp.moveaxis(w, -2, 0), -2, 1)


def _first(shard: _Shard, layout: Layout) -> jax.Array | int:
    """Vocabulary index of this rank's first column."""
    return 0 if layout.model == 1 else lax.axis_index(MODEL) * shard.size


def _indices(shard: _Shard, layout: Layout) -> jax.Array:
    """Vocabulary index of every place of `_split`: int32 [blocks, leaves, block]; -1 where none."""
    index = _first(shard, layout) + jnp.arange(shard.size, dtype=jnp.int32)
    return _split(index + 1, shard) - 1


def _start(shape: tuple[int, ...]) -> Statistics:
    # a finite floor, so that an empty start shrinks by exp(floor - maximum) = 0 and is never nan
    low = jnp.full(shape, jnp.finfo(jnp.float32).min)
    zero = jnp.zeros(shape, jnp.float32)
    return Statistics(low, zero, zero, jnp.full(shape, -jnp.inf))


def _scaled(x: jax.Array, w: jax.Array, inverse: jax.Array, policy: Policy) -> jax.Array:
    """Scaled logits: x [T, H], w [..., H, N], inverse temperature [T] -> float32 [..., T, N]."""
    return tree_dot(x, w, policy.dot_width) * inverse[:, None]


def _walk(x, w, targets, inverse, threshold, policy: Policy, layout: Layout) -> Statistics:
    shard = _shard(w.shape[1], policy, layout)

    def step(s, block):
        columns, index = block
        z = _scaled(x, columns, inverse, policy)
        z = jnp.where(index[:, None, :] >= 0, z, -jnp.inf)
        return _absorb(s, z, index[:, None, :] == targets[:, None], threshold), None

    start = _start((shard.leaves, x.shape[0]))
    s, _ = lax.scan(step, start, (_split(w, shard), _indices(shard, layout)))
    return _finish(s, layout)


def _both(s: Statistics) -> Logprobs:
    z, log_total, log_kept = s.target - s.maximum, elementary.log(s.total), elementary.log(s.kept)
    return Logprobs(z - log_total, z - log_kept, s.maximum + log_total, s.maximum + log_kept)


def _kernel_walk(x, w, targets, inverse, threshold, policy: Policy, layout: Layout) -> Logprobs:
    shard = _shard(w.shape[1], policy, layout)
    stats, target = kernels.linear_logprob_stats(
        x, w, targets - _first(shard, layout), inverse, threshold, leaves=shard.leaves
    )
    if layout.model > 1:
        stats = kernels.Statistics(*(lax.all_gather(s, MODEL, tiled=True) for s in stats))
        target = jnp.max(lax.all_gather(target, MODEL), axis=0)
    return kernels.combine_leaves(stats, target)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logprob(static, x, w, targets, inverse, threshold):
    return _linear_logprob_forward(static, x, w, targets, inverse, threshold)[0]


def _linear_logprob_forward(static, x, w, targets, inverse, threshold):
    policy, layout = static
    own = tuple(context_part(a, layout) for a in (targets, inverse, threshold))
    rows = gather_rows(x, layout)
    if policy.evaluation == "mosaic":
        out = _kernel_walk(rows, weight.value(w), *own, *static)
    else:
        out = _both(_walk(rows, weight.value(w), *own, *static))
    both = tuple(all_context_rows(a, layout) for a in (out.full, out.kept))
    return both, (x, w, *own, out.lse, out.lse_kept)


def _linear_logprob_backward(static, saved, cotangents):
    policy, layout = static
    x, w, targets, inverse, threshold, lse, lse_kept = saved
    values, rows = weight.value(w), gather_rows(x, layout)
    full, kept = (context_part(d, layout) for d in cotangents)
    gradients = kernels.Gradients(lse, full, (threshold, lse_kept, kept))
    if policy.evaluation == "mosaic":
        shard = _shard(values.shape[1], policy, layout)
        own = targets - _first(shard, layout)
        dx, dw = kernel.call(
            linear_logprob_backward, rows, values, own, inverse, gradients,
            leaves=shard.leaves, batch_leaves=row_leaves(policy, layout),
        )  # fmt: skip
    else:
        dx, dw = _walk_back(rows, values, targets, inverse, gradients, policy, layout)
    return model_sum(dx, layout, x.dtype), weight.cotangent(w, dw), None, None, None


def _walk_back(x, w, targets, inverse, gradients, policy, layout):
    """(gradient by x, this rank's part [T, H]; by w [H, V / model]), float32."""
    shard, leaves = _shard(w.shape[1], policy, layout), row_leaves(policy, layout)
    threshold, *of_kept = gradients.kept
    lse, full, lse_kept, kept = (a[:, None] for a in (gradients.lse, gradients.grad, *of_kept))

    def step(dx, block):
        columns, index = block
        z = _scaled(x, columns, inverse, policy)
        hit = index[:, None, :] == targets[:, None]
        p = elementary.exp(z - lse)
        p_kept = jnp.where(z >= threshold[:, None], elementary.exp(z - lse_kept), 0.0)
        dz = full * (hit - p) + kept * (hit - p_kept)
        dz = jnp.where(index[:, None, :] >= 0, dz * inverse[:, None], 0.0).astype(x.dtype)
        dx = dx + tree_dot(dz, jnp.swapaxes(columns, 1, 2), policy.dot_width)
        dw = jax.vmap(lambda d: leaf_dot(x.T, d, leaves, policy.dot_width))(dz)
        return dx, dw

    zero = jnp.zeros((shard.leaves, *x.shape), jnp.float32)
    dx, dw = lax.scan(step, zero, (_split(w, shard), _indices(shard, layout)))
    dw = jnp.moveaxis(dw, 0, 2)  # [leaves, H, blocks, block]
    dw = dw.reshape(*dw.shape[:2], -1)[..., : shard.leaf]
    return pair_sum(dx), jnp.moveaxis(dw, 0, 1).reshape(x.shape[1], -1)


_linear_logprob.defvjp(_linear_logprob_forward, _linear_logprob_backward)


@op("linear_logprob", static=("policy", "layout"))
def linear_logprob(
    x: jax.Array,
    w: Parameter,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    threshold: jax.Array,
    *,
    policy: Policy,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of targets: (over the full vocabulary, over the kept set), float32 [T].

    x: this rank's rows [., H] of the residual stream; w [H, V / model]; targets int32 [T];
    inverse_temperature, threshold float32 [T], of all rows of the data rank, as the results are; a
    threshold of -inf keeps everything. A target outside its kept set has kept log-probability z -
    lse(kept) all the same.
    """
    return _linear_logprob((policy, layout), x, w, targets, inverse_temperature, threshold)


@op("scaled_logits", static=("policy", "layout"))
def scaled_logits(
    x: jax.Array, w: Parameter, inverse_temperature: jax.Array, *, policy: Policy, layout: Layout
) -> jax.Array:
    """x [S, H], w [H, V / model], inverse_temperature [S] -> float32 [S, V], the same on every
    rank.

    The bits are those that `linear_logprob` sees.
    """
    z = product(x, weight.value(w), policy) * inverse_temperature[:, None]
    return z if layout.model == 1 else lax.all_gather(z, MODEL, axis=1, tiled=True)


@op("logits_logprob", static=("policy",))
def logits_logprob(
    z: jax.Array, targets: jax.Array, threshold: jax.Array, *, policy: Policy
) -> tuple[jax.Array, jax.Array]:
    """What `linear_logprob` gives, from the whole scaled logits z [S, V] of `scaled_logits`."""
    one = Layout()
    shard = _shard(z.shape[1], policy, one)
    if policy.evaluation == "mosaic":
        stats = kernels.logits_stats(z, threshold, leaves=shard.leaves)
        target = jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
        out = kernels.combine_leaves(stats, target)
        return out.full, out.kept

    def step(s, block):
        z, index = block
        z = jnp.where(index[:, None, :] >= 0, z, -jnp.inf)
        return _absorb(s, z, index[:, None, :] == targets[:, None], threshold), None

    start = _start((shard.leaves, z.shape[0]))
    s, _ = lax.scan(step, start, (_split(z, shard), _indices(shard, one)))
    out = _both(_finish(s, one))
    return out.full, out.kept
