"""Reduction trees written out in elementwise adds: the order of every sum is in the program text.

XLA may schedule, tile and vectorise elementwise adds as it likes but never reassociates them, so
the bits of a row follow from the row alone. All sums are float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def halving(x: jax.Array) -> jax.Array:
    """Sum float32 x [n, ...] over its first axis: x[i] + x[i + n/2], ...; n is a power of two."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


def _extend(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros behind `axis` up to length `size`; zeros add exactly."""
    if x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def tree_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sum along `axis` by halving, in float32; first extended with zeros to a power of two."""
    axis %= x.ndim
    x = _extend(x.astype(jnp.float32), axis, _power(x.shape[axis]))
    while (size := x.shape[axis]) > 1:
        low = lax.slice_in_dim(x, 0, size // 2, axis=axis)
        x = low + lax.slice_in_dim(x, size // 2, size, axis=axis)
    return lax.squeeze(x, (axis,))


def tree_sum_by_passes(x: jax.Array, axis: int = -1) -> jax.Array:
    """The bits of `tree_sum`, for long axes: one pass over memory for three levels of the tree.

    XLA melts all levels into one loop if it may, which takes long to compile and to run.
    """
    axis %= x.ndim
    x = _extend(x.astype(jnp.float32), axis, _power(x.shape[axis]))
    while x.shape[axis] > 8:
        x = x.reshape(*x.shape[:axis], 8, x.shape[axis] // 8, *x.shape[axis + 1 :])
        x = lax.optimization_barrier(tree_sum(x, axis))
    return tree_sum(x, axis)


def pair_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Sum along `axis` by neighbours, (x0 + x1) + (x2 + x3), extended with zeros to a power of two.

    This is the tree of leaves: an aligned power-of-two run of leaves is a whole subtree, so ranks
    that own such runs can each evaluate theirs and any of them can finish the rest.
    """
    x = jnp.moveaxis(x, axis, 0)
    x = _extend(x, 0, _power(x.shape[0]))
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def tree_dot(
    a: jax.Array,
    b: jax.Array,
    width: int = 16,
    pick: Callable[[jax.Array], jax.Array] = lambda step: step,
) -> jax.Array:
    """a [..., M, K] times b [..., K, N] -> float32 [..., M, N], leading axes broadcast.

    K is walked in steps of `width`; a step's products are added by halving, and the steps join one
    running sum in order. K is extended with zeros to a multiple of `width`. pick: applied to each
    step [..., width, N] of b before it is used, to choose along leading axes without a copy of b.
    """
    if b.shape[-2] != a.shape[-1]:
        raise ValueError(f"tree_dot contracts {a.shape} with {b.shape}")
    steps = max(1, -(-a.shape[-1] // width))
    a = _extend(a, a.ndim - 1, steps * width)
    b = _extend(b, b.ndim - 2, steps * width)
    a = jnp.moveaxis(a.reshape(*a.shape[:-1], steps, width), -2, 0)
    b = jnp.moveaxis(b.reshape(*b.shape[:-2], steps, width, b.shape[-1]), -3, 0)

    def step(total: jax.Array, ab: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        left, right = ab[0].astype(jnp.float32), pick(ab[1]).astype(jnp.float32)
        parts = [left[..., :, i : i + 1] * right[..., i : i + 1, :] for i in range(width)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [x + y for x, y in zip(parts[:half], parts[half:], strict=True)]
        return total + parts[0], None

    picked = jax.eval_shape(pick, b[0])
    batch = jnp.broadcast_shapes(a.shape[1:-2], picked.shape[:-2])
    zero = jnp.zeros((*batch, a.shape[-2], b.shape[-1]), jnp.float32)
    if steps == 1:
        return step(zero, (a[0], b[0]))[0]
    return lax.scan(step, zero, (a, b))[0]


def leaf_dots(a: jax.Array, b: jax.Array, leaves: int, width: int = 16) -> jax.Array:
    """a [M, K] times b [K, N] by equal leaves of K, each a `tree_dot` -> float32 [leaves, M, N]."""
    k = a.shape[-1]
    if k % leaves:
        raise ValueError(f"a contraction over {k} cannot be cut into {leaves} equal leaves")
    a = jnp.moveaxis(a.reshape(a.shape[0], leaves, k // leaves), 1, 0)
    return tree_dot(a, b.reshape(leaves, k // leaves, b.shape[-1]), width)


def leaf_dot(a: jax.Array, b: jax.Array, leaves: int, width: int = 16) -> jax.Array:
    """a [M, K] times b [K, N] -> float32 [M, N]: `leaf_dots`, combined by `pair_sum`."""
    return pair_sum(leaf_dots(a, b, leaves, width))


def token_leaves(x: jax.Array, leaves: int) -> jax.Array:
    """Sum x [T, ...] over the tokens of each leaf -> float32 [leaves, ...].

    T is `leaves` contiguous leaves of equal length. Within a leaf rows join in blocks of 16 as in
    `tree_dot`.
    """
    rows = x.shape[0] // leaves
    ones = jnp.ones((1, rows), jnp.float32)
    return tree_dot(ones, x.reshape(leaves, rows, -1)).reshape(leaves, *x.shape[1:])


def token_sum(x: jax.Array, leaves: int) -> jax.Array:
    """Sum x [T, ...] over its tokens -> float32 [...]: `token_leaves`, combined by `pair_sum`."""
    return pair_sum(token_leaves(x, leaves))
