"""What a run's configuration says of training, as the trainer takes it."""

from jax.sharding import Mesh

from isojax.config import RunConfig
from isojax.models.config import ModelConfig
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer


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


def trainer(config: RunConfig, model: ModelConfig, mesh: Mesh) -> Trainer:
    """The programs that train."""
    return Trainer(
        model,
        config.policy,
        config.mesh,
        mesh,
        adamw(config),
        microbatch_tokens=config.trainer.microbatch_tokens,
        remat=config.trainer.remat,
        longest=config.max_length,
    )


def scorer(config: RunConfig, model: ModelConfig, mesh: Mesh) -> Scorer:
    """The program that scores."""
    return Scorer(
        model,
        config.policy,
        config.mesh,
        mesh,
        config.trainer.microbatch_tokens,
        longest=config.max_length,
    )
