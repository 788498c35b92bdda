"""Online softmax of one tile of query rows: the arithmetic that every attention kernel shares.

A tile's state is (m, mass, acc): per row an exponent m [64], the mass [64], which is the sum of
exp2(x - m), and acc [64, D], the values weighted by it, where x = scale * log2(e) * (q . k). Two
properties make a row's bits independent of everything but its own query and the keys before it:

- Every step acts on each row alone, with one order of operations. A tile of a training batch and a
  tile that holds one decoded token run these functions in the same register layout.
- m is an integer, so every rescale is a product with a power of two, which is exact: contracting
  it with an addition into an FMA cannot change a bit. It is the running maximum, rounded.

Algorithm: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the blocks
and the order of the products as in Dao, "FlashAttention-2" (2023).
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64  # rows of a wgmma tile
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

State = tuple[jax.Array, jax.Array, jax.Array]


def rows_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A per-row vector [ROWS] broadcast along the columns of `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])


def empty(dim: int) -> State:
    """State of a tile that has seen no key: the neutral element of `fold`."""
    row, tile = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    return (
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), row),
        plgpu.layout_cast(jnp.full((ROWS, dim), 0.0, jnp.float32), tile),
    )


def causal(s: jax.Array, row_position: jax.Array, key_position: jax.Array) -> jax.Array:
    """Scores [ROWS, B] with -inf where the key's position is beyond the row's.

    row_position, key_position: int32 scalars, the positions of row 0 and of column 0.
    """
    rows = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
    keys = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(keys + key_position <= rows + row_position, s, -jnp.inf)


def weigh(m: jax.Array, s: jax.Array, scale: float, *, masked: bool) -> tuple[jax.Array, ...]:
    """Of a block's scores s [ROWS, B]: the new m, the rescale factor of the state, exp2(x - m).

    scale: the factor of q . k, log2(e) included. masked: whether a row may see no key of this and
    all earlier blocks; its m is then -inf and its weights are zero.
    """
    top = jnp.maximum(m, jnp.round(s.max(axis=1) * scale))
    pivot = jnp.where(top == -jnp.inf, 0.0, top) if masked else top
    return top, jnp.exp2(m - pivot), jnp.exp2(s * scale - rows_of(pivot, s.shape))


def fold(a: State, b: State) -> State:
    """The state of a's keys, then b's; a is not empty. acc may be any columns of the tile."""
    top = jnp.maximum(a[0], b[0])
    u, v = jnp.exp2(a[0] - top), jnp.exp2(b[0] - top)
    shape = a[2].shape
    return top, a[1] * u + b[1] * v, a[2] * rows_of(u, shape) + b[2] * rows_of(v, shape)


def normalise(mass: jax.Array, acc: jax.Array) -> jax.Array:
    """Attention output [ROWS, D] in float32 of a finished state."""
    # an underflow leaves -0.0, which a block that the row cannot see turns to 0.0: do so always
    return acc * rows_of(1.0 / mass, acc.shape) + 0.0


def log_sum_exp(m: jax.Array, mass: jax.Array) -> jax.Array:
    """Natural log-sum-exp [ROWS] of the scaled scores of a finished state."""
    return (m + jnp.log2(mass)) * LN2
