"""Reduction trees written out in elementwise adds: the order of every sum is in the program text.

XLA may schedule, tile and vectorise elementwise adds as it likes but never reassociates them, so the bits of
a row follow from the row alone. All sums are float32.
"""

import jax
import jax.numpy as jnp
from jax import lax


def tree_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sum along `axis` by halving: x[i] + x[i + n/2], until one is left.

    A length that is no power of two is first extended with zeros, which add exactly.
    """
    axis %= x.ndim
    x = x.astype(jnp.float32)
    size = x.shape[axis]
    full = 1 << max(size - 1, 0).bit_length()
    if full != size:
        x = jnp.pad(x, [(0, full - size if i == axis else 0) for i in range(x.ndim)])
    while full > 1:
        full //= 2
        x = lax.slice_in_dim(x, 0, full, axis=axis) + lax.slice_in_dim(x, full, 2 * full, axis=axis)
    return lax.squeeze(x, (axis,))


def pair_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Sum along `axis` by adjacent pairs: (x0 + x1) + (x2 + x3), ... The length is a power of two.

    This is the tree of leaves: a contiguous power-of-two run of leaves is a whole subtree, so ranks that own
    such runs can each evaluate theirs and any of them can finish the rest.
    """
    x = jnp.moveaxis(x, axis, 0)
    if x.shape[0] & (x.shape[0] - 1):
        raise ValueError(f"a leaf tree needs a power of two of leaves, got {x.shape[0]}")
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def tree_dot(a: jax.Array, b: jax.Array, width: int = 16) -> jax.Array:
    """a [..., M, K] times b [..., K, N] -> float32 [..., M, N], leading axes broadcast.

    K is walked in steps of `width`; a step's products are added by halving, and the steps join one
    running sum in order. K is extended with zeros to a multiple of `width`.
    """
    k = a.shape[-1]
    if b.shape[-2] != k:
        raise ValueError(f"tree_dot contracts {a.shape} with {b.shape}")
    steps = max(1, -(-k // width))
    if steps * width != k:
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, steps * width - k)])
        b = jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, steps * width - k), (0, 0)])
    a = jnp.moveaxis(a.reshape(*a.shape[:-1], steps, width), -2, 0)
    b = jnp.moveaxis(b.reshape(*b.shape[:-2], steps, width, b.shape[-1]), -3, 0)

    def step(total: jax.Array, ab: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        left, right = (x.astype(jnp.float32) for x in ab)
        parts = [left[..., :, i : i + 1] * right[..., i : i + 1, :] for i in range(width)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [x + y for x, y in zip(parts[:half], parts[half:], strict=True)]
        return total + parts[0], None

    batch = jnp.broadcast_shapes(a.shape[1:-2], b.shape[1:-2])
    zero = jnp.zeros((*batch, a.shape[-2], b.shape[-1]), jnp.float32)
    if steps == 1:
        return step(zero, (a[0], b[0]))[0]
    return lax.scan(step, zero, (a, b))[0]


def leaf_dot(a: jax.Array, b: jax.Array, leaves: int, width: int = 16) -> jax.Array:
    """a [M, K] times b [K, N] with K cut into `leaves` equal leaves -> float32 [M, N].

    Each leaf is a `tree_dot`; leaves combine by `pair_sum`.
    """
    k = a.shape[-1]
    if k % leaves:
        raise ValueError(f"a contraction over {k} cannot be cut into {leaves} equal leaves")
    a = jnp.moveaxis(a.reshape(a.shape[0], leaves, k // leaves), 1, 0)
    b = b.reshape(leaves, k // leaves, b.shape[-1])
    return pair_sum(tree_dot(a, b, width))


def token_sum(x: jax.Array, leaves: int) -> jax.Array:
    """Sum x [T, ...] over its tokens -> float32 [...].

    T is `leaves` contiguous leaves of equal length. Within a leaf rows join in blocks of 16 as in
    `tree_dot`; leaves combine by `pair_sum`.
    """
    ones = jnp.ones((1, x.shape[0]), jnp.float32)
    return leaf_dot(ones, x.reshape(x.shape[0], -1), leaves).reshape(x.shape[1:])
