"""What a run's configuration says of training, as the trainer takes it."""

from isojax.config import RunConfig
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule


def adamw(config: RunConfig) -> AdamW:
    """The optimizer."""
    t = config.trainer
    return AdamW(
        beta1=t.beta1,
        beta2=t.beta2,
        epsilon=t.epsilon,
        weight_decay=t.weight_decay,
        max_grad_norm=t.max_grad_norm,
    )


def schedule(config: RunConfig) -> Schedule:
    """Learning rates of reinforcement learning."""
    return Schedule(config.trainer.learning_rate, config.trainer.warmup_steps)


def warm_schedule(config: RunConfig) -> Schedule:
    """Learning rates of the supervised warm start."""
    return Schedule(config.warm_start.learning_rate, config.trainer.warmup_steps)


def policy_loss(config: RunConfig) -> PolicyLoss:
    """The loss, of both."""
    a = config.algorithm
    return PolicyLoss(a.clip_low, a.clip_high, a.dual_clip)
