"""The one forward: it backs the paged sampler and the trainer, on the same arrays and the same
mesh.

`forward` and `logprobs` are per-rank functions: call them inside `shard_map`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from isojax.batch import RaggedBatch
from isojax.cache import Cache
from isojax.mesh import Layout
from isojax.models.blocks import Static, attention_block, delta_block, mlp, moe
from isojax.models.config import ModelConfig
from isojax.numerics.collectives import context_part
from isojax.numerics.policy import Policy
from isojax.ops.attention import attention_work
from isojax.ops.elementwise import add
from isojax.ops.embedding import embedding
from isojax.ops.logprob import linear_logprob
from isojax.ops.norm import rms_norm
from isojax.ops.rotary import rotary_table


def forward(
    params: dict,
    batch: RaggedBatch,
    cache: Cache,
    *,
    model: ModelConfig,
    policy: Policy,
    layout: Layout,
    remat: bool = False,
) -> tuple[jax.Array, Cache]:
    """Final hidden rows of the batch's tokens, and the cache with them in it.

    The rows [., H] are those of the residual stream that this rank keeps: all T, unless the layout
    cuts them (see `isojax.mesh`).

    Layers repeat with a period, so one period is traced and scanned. remat: recompute a layer's
    inner values in the backward instead of keeping them; each layer then works on the cache as it
    is given, and so it comes back, since what a layer found in it would have to be kept too.
    """
    s = Static(model, policy, layout)
    kinds = model.layer_types[: model.period]
    tokens, positions = (context_part(x, layout) for x in (batch.tokens, batch.positions))
    table = rotary_table(positions, rotary_dim=model.rotary_dim, theta=model.rope_theta)
    work = attention_work(batch, cache.keys, heads=model.num_attention_heads, **s.ops)
    per_period = {kind: kinds.count(kind) for kind in kinds}

    def entry(pool: jax.Array | None, period: jax.Array, kind: str, index: int) -> jax.Array:
        """Which entry of the cache a layer uses: its own, or the one that all layers share."""
        if pool is None or pool.shape[0] == 1:
            return jnp.int32(0)
        return period * per_period[kind] + index

    def layer(x, cache, p, at):
        h = rms_norm(x, p["input_norm"], **s.norm)
        if "attn" in p:
            y, cache = attention_block(p["attn"], h, batch, cache, at, table, work, s)
        else:
            y, cache = delta_block(p["gdn"], h, batch, cache, at, s)
        x = add(x, y, policy=policy)
        h = rms_norm(x, p["post_norm"], **s.norm)
        y = moe(p["moe"], h, s) if "moe" in p else mlp(p["mlp"], h, s)
        # what is cached serves later calls; a training call's gradient never flows through it
        return add(x, y, policy=policy), lax.stop_gradient(cache)

    @jax.checkpoint
    def recomputed(x, p, at):
        # behind a barrier: work on the given cache alone must not leave the loop over layers
        x, given = lax.optimization_barrier((x, cache))
        return layer(x, given, p, at)[0]

    def period(carry, scanned):
        x, current = carry
        number, layers = scanned
        seen = dict.fromkeys(kinds, 0)
        for kind, p in zip(kinds, layers, strict=True):
            pool = cache.keys if kind == "full_attention" else cache.conv
            at = entry(pool, number, kind, seen[kind])
            if remat:
                x = recomputed(x, p, at)
            else:
                x, current = layer(x, current, p, at)
            seen[kind] += 1
        return (x, current), None

    x = embedding(tokens, params["embed"], **s.ops)
    periods = jnp.arange(model.num_layers // model.period, dtype=jnp.int32)
    current = None if remat else cache
    (x, current), _ = lax.scan(period, (x, current), (periods, params["layers"]))
    return rms_norm(x, params["norm"], **s.norm), cache if current is None else current


def head(params: dict) -> jax.Array:
    """The language-model head [H, V / model]: its own, or the embedding's transpose when tied."""
    return (
        params["lm_head"] if "lm_head" in params else jax.tree.map(jnp.transpose, params["embed"])
    )


def logprobs(
    params: dict,
    hidden: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    threshold: jax.Array,
    *,
    policy: Policy,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities float32 [T] of targets under `forward`'s hidden rows: full
    vocabulary, kept set.
    """
    return linear_logprob(
        hidden, head(params), targets, inverse_temperature, threshold, policy=policy, layout=layout
    )
