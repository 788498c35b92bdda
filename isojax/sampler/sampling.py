"""From logits to tokens: truncation to a threshold, and Gumbel-max with keyed bits.

Row: a token depends on its own scaled logits z, settings, key and position alone.

Truncation keeps {v: z[v] >= threshold}, so ties with the last kept token are kept, and whoever has
the threshold and the same bits of z has the set. Thresholds are found without a sort: the largest t
such that enough tokens (top-k) or enough probability (top-p) lie at or above t, bit by bit from the
top. Probabilities are integers of 2**-31 there, so their sums have no order.

Sampling is argmax of z + g over the kept set, ties to the lowest index: a draw from its softmax
when the g are independent Gumbel variables (Maddison et al., arXiv 1411.0030). g[v] is a function
of (key, position, v): neither order nor batch nor mesh is in it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isojax.numerics import elementary
from isojax.numerics.trees import tree_sum
from isojax.ops.op import op
from isojax.sampler.random import threefry

_SIGN = np.uint32(1 << 31)


class Settings(NamedTuple):
    """How each of S rows is sampled.

    key uint32 [S, 2]: see `random.sample_key`. position int32 [S]: of the token to be sampled.
    greedy int32 [S]: 1 takes the largest logit. top_k int32 [S]: 0 keeps all.
    top_p, min_p float32 [S]: 1 and 0 keep all.
    """

    key: jax.Array
    position: jax.Array
    greedy: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def _ordered(z: jax.Array) -> jax.Array:
    """Float32 bits as uint32 that compare as the numbers do."""
    u = lax.bitcast_convert_type(z, jnp.uint32)
    return jnp.where(u >= _SIGN, ~u, u | _SIGN)


def _number(u: jax.Array) -> jax.Array:
    """The inverse of `_ordered`."""
    u = jnp.where(u >= _SIGN, u ^ _SIGN, ~u)
    return lax.bitcast_convert_type(u, jnp.float32)


def _largest(u: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """The largest t [S] such that the weights [S, V] of entries u [S, V] >= t sum to >= target [S].

    All are uint32; the weights of a row together must reach its target and fit 32 bits.
    """

    def bit(i, t):
        higher = t | (_SIGN >> i.astype(jnp.uint32))
        above = jnp.where(u >= higher[:, None], weight, 0)
        return jnp.where(jnp.sum(above, axis=1, dtype=jnp.uint32) >= target, higher, t)

    return lax.fori_loop(0, 32, bit, jnp.zeros_like(target))


def _truncated(z: jax.Array, s: Settings) -> jax.Array:
    """The smallest scaled logit that every setting keeps: float32 [S]; -inf where all are kept."""
    u, vocab = _ordered(z), z.shape[1]
    count = jnp.where((s.top_k > 0) & (s.top_k < vocab), s.top_k, vocab)
    threshold = _largest(u, jnp.ones_like(u), count.astype(jnp.uint32))

    maximum = jnp.max(z, axis=1, keepdims=True)
    e = elementary.exp(z - maximum)
    p = e * (2.0**31 / tree_sum(e)[:, None])
    mass = jnp.minimum(p, 2.0**31).astype(jnp.uint32)
    within = jnp.where(u >= threshold[:, None], mass, 0)
    within = jnp.sum(within, axis=1, dtype=jnp.uint32)
    target = jnp.ceil(within.astype(jnp.float32) * s.top_p).astype(jnp.uint32)
    nucleus = _largest(u, mass, jnp.clip(target, 1, within))
    threshold = _number(jnp.where(s.top_p < 1, jnp.maximum(threshold, nucleus), threshold))

    relative = jnp.where(s.min_p > 0, maximum[:, 0] + elementary.log(s.min_p), -jnp.inf)
    kept = z >= jnp.maximum(threshold, relative)[:, None]
    least = jnp.min(jnp.where(kept, z, jnp.inf), axis=1)
    return jnp.where(jnp.all(kept, axis=1) | (s.greedy > 0), -jnp.inf, least)


def _gumbel(key: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel variables float32 [S, vocab].

    64 bits make v in [2**-66, 1), as fine near 0 as float32 is; -log1p(-v) is exponential, and the
    large Gumbel values, which decide the argmax, come from the small v.
    """
    counter = (
        position.astype(jnp.uint32)[:, None],
        jnp.arange(vocab, dtype=jnp.uint32)[None, :],
    )
    high, low = threefry((key[:, :1], key[:, 1:]), counter)
    low = (low.astype(jnp.float32) + 0.25) * 2.0**-64  # never zero
    v = jnp.minimum(high.astype(jnp.float32) * 2.0**-32 + low, 1 - 2.0**-24)
    return -elementary.log(-elementary.log1p(-v))


@op("sample")
def sample(z: jax.Array, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each row of scaled logits z float32 [S, V].

    Returns (tokens int32 [S], thresholds float32 [S]: the smallest z that was kept, -inf where
    nothing was cut).
    """
    s = settings
    cuts = (s.greedy == 0) & ((s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0))
    everything = jnp.full(z.shape[:1], -jnp.inf)
    threshold = lax.cond(jnp.any(cuts), _truncated, lambda z, s: everything, z, s)
    noisy = z + _gumbel(s.key, s.position, z.shape[1])
    score = jnp.where(s.greedy[:, None] > 0, z, noisy)
    score = jnp.where(z >= threshold[:, None], score, -jnp.inf)
    return jnp.argmax(score, axis=1).astype(jnp.int32), threshold
