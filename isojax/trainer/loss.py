"""Losses of one call: a value a token, from its log-probability; the sum over tokens is a leaf
tree.

Row: loss[t] and stats[t] depend on row t alone.
Tree: `token_sum` over this data rank's batch leaves, then `data_sum` over ranks.
Rounding: float32 throughout.
Gradient: by logp, autodiff of the row; a row whose term is clipped, or that has no weight, gets
  exact 0.

The policy loss is DAPO's (Yu et al., 2025, arXiv:2503.14476, eq. 8-10) with the lower bound for
negative advantages of dual-clip PPO (Ye et al., 2020, arXiv:1912.09729).
"""

import dataclasses

import jax
import jax.numpy as jnp

from isojax.mesh import Layout
from isojax.numerics import elementary
from isojax.numerics.collectives import data_sum
from isojax.numerics.policy import Policy
from isojax.numerics.trees import token_sum
from isojax.ops.op import op
from isojax.trainer.packing import TrainBatch

# columns of `stats`, each summed over the tokens of a minibatch
STATS = ("tokens", "clipped_high", "clipped_low", "clipped_dual", "negative_logp", "log_ratio")


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy gradient of tokens.

    The probabilities are those over the set that a truncating sampler kept: the whole vocabulary
    where it kept all of it, and then they are the full ones to the last bit.

    clip_low, clip_high: the ratio of probabilities is held in [1 - clip_low, 1 + clip_high].
    dual_clip: with a negative advantage the loss is at most dual_clip * |advantage|.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 10.0

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0 and self.dual_clip > 1):
            raise ValueError(
                "the policy loss needs 0 <= clip_low < 1, clip_high >= 0 and dual_clip > 1, "
                f"got {self.clip_low}, {self.clip_high}, {self.dual_clip}"
            )

    def __call__(self, logp: jax.Array, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities [T] over the kept vocabulary -> loss [T], stats [T, K]."""
        return policy_loss(
            logp,
            batch.old_logp,
            batch.advantage,
            batch.weight,
            bounds=(self.clip_low, self.clip_high, self.dual_clip),
        )


@op("policy_loss", static=("bounds",))
def policy_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    weight: jax.Array,
    *,
    bounds: tuple[float, float, float],
) -> tuple[jax.Array, jax.Array]:
    """Clipped surrogate of each token. All arrays float32 [T]; bounds = (clip_low, clip_high,
    dual_clip).

    With r = exp(logp - old_logp) and A the advantage, the objective is min(r A, clip(r) A), and no
    less than dual_clip A where A < 0. Where old_logp is NaN the old policy is the present one: r is
    1 and the gradient that of A logp; with A = 1, maximum likelihood.

    Returns loss [T] = -weight * objective and stats [T, len(STATS)].
    """
    low, high, dual = (jnp.float32(x) for x in (1 - bounds[0], 1 + bounds[1], bounds[2]))
    asked = weight > 0
    old_logp = jnp.where(jnp.isnan(old_logp), jax.lax.stop_gradient(logp), old_logp)
    log_ratio = jnp.where(asked, logp - old_logp, 0.0)
    ratio = elementary.exp(jax.lax.stop_gradient(log_ratio))
    clipped_high = asked & (advantage > 0) & (ratio > high)
    clipped_low = asked & (advantage < 0) & (ratio < low)
    clipped_dual = asked & (advantage < 0) & (ratio > dual)
    # the live branch never sees a ratio that overflows: its gradient would be inf * 0
    live = ~(clipped_high | clipped_low | clipped_dual)
    bound = jnp.where(clipped_high, high, jnp.where(clipped_low, low, dual))
    factor = jnp.where(live, elementary.exp(jnp.where(live, log_ratio, 0.0)), bound)
    loss = jnp.where(asked, -weight * (factor * advantage), 0.0)
    columns = (asked, clipped_high, clipped_low, clipped_dual, -logp, log_ratio)
    return loss, _stats(asked, columns)


def _stats(asked: jax.Array, columns: tuple[jax.Array, ...]) -> jax.Array:
    rows = jnp.stack([column.astype(jnp.float32) for column in columns], axis=-1)
    return jax.lax.stop_gradient(jnp.where(asked[:, None], rows, 0.0))


@op("token_total", static=("policy", "layout"))
def token_total(terms: jax.Array, *, policy: Policy, layout: Layout) -> jax.Array:
    """terms float32 [T, ...] -> [...]: summed over this data rank's tokens only."""
    return token_sum(terms, policy.row_leaves // layout.data)


@op("rank_total", static=("layout",))
def rank_total(partial: jax.Array, *, layout: Layout) -> jax.Array:
    """Finish `token_total` over the data ranks: the same on every rank."""
    return data_sum(partial, layout)
