"""The settings of a run, as frozen dataclasses; `config_io.py` reads and writes them."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.hf import load_config
from isojax.numerics.policy import Policy


def _at_least(section: Any, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _finite(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How responses are drawn, and how large the rollout engine is on each data rank.

    max_tokens: most tokens of a response.
    temperature: logits are divided by it; 0 is greedy.
    top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
    top_k: keep this many tokens; 0 keeps all.
    min_p: keep tokens of at least this probability relative to the likeliest; 0 keeps all.
    stop: strings that end a response.
    max_sequences: sequences that run at the same time.
    max_batch_tokens: most new tokens of one engine call; longer prompts are prefilled in pieces.
    pages: size of the page pool, in pages of policy.chunk tokens; 0 makes room for max_sequences
      full sequences.
    bucket_sizes: how many sizes of the decode call and of the mixed call are compiled, each a
      quarter of the one before.
    """

    max_tokens: int = 8192
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_sequences: int = 64
    max_batch_tokens: int = 10_240
    pages: int = 0
    bucket_sizes: int = 2

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_tokens", "max_sequences", "max_batch_tokens", "bucket_sizes")
        _at_least(self, 0, "temperature", "top_k", "min_p", "pages")
        _finite(self, "temperature")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be within (0, 1], got {self.top_p}")
        if self.min_p > 1:
            raise ValueError(f"min_p must be within [0, 1], got {self.min_p}")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """The optimizer (AdamW) and the size of its steps.

    learning_rate: after the warm-up.
    warmup_steps: optimizer steps over which the rate rises linearly.
    weight_decay: decoupled decay of matrices.
    beta1: decay of the gradient's running mean.
    beta2: decay of the squared gradient's running mean.
    epsilon: added to the root of the latter.
    max_grad_norm: gradients of a larger global norm are scaled down to it; 0 never scales.
    minibatch_prompts: prompts, each with all its samples, of one optimizer step.
    microbatch_tokens: most tokens of one batch leaf in one forward and backward call; a data
      rank holds policy.batch_leaves / mesh.data leaves. A multiple of policy.chunk.
    remat: recompute activations in the backward instead of keeping them.
    checkpoint_every: training steps between checkpoints; 0 writes one at the end only.
    keep_checkpoints: how many of the latest checkpoints stay.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 40
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    minibatch_prompts: int = 32
    microbatch_tokens: int = 20_480
    remat: bool = True
    checkpoint_every: int = 0
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        _at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm")
        _at_least(self, 0, "beta1", "beta2", "checkpoint_every")
        _at_least(self, 1, "minibatch_prompts", "microbatch_tokens", "keep_checkpoints")
        _finite(self, "learning_rate", "weight_decay", "epsilon")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on the right answers before the first rollout, for an untrained model.

    steps: optimizer steps; 0 leaves the model as it is.
    prompts: prompts of one step.
    learning_rate: of these steps.
    """

    steps: int = 0
    prompts: int = 64
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        _at_least(self, 0, "steps", "learning_rate")
        _finite(self, "learning_rate")
        _at_least(self, 1, "prompts")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """DAPO (Yu et al., 2025, arXiv:2503.14476).

    prompts_per_step: prompts whose groups make up one rollout batch.
    samples_per_prompt: responses to each prompt: the group that the advantage is relative to.
    clip_low: the ratio of probabilities is held above 1 - clip_low.
    clip_high: and below 1 + clip_high.
    dual_clip: with a negative advantage the loss is at most dual_clip * |advantage|.
    mismatch_cap: a token counts as mismatch-clipped when the trainer's probability of it, before
      the update, exceeds the rollout's by this factor.
    normalize_by_std: divide a group's centred rewards by their standard deviation.
    dynamic_sampling: drop groups whose rewards are all alike, and sample until the batch is full.
    max_sampling_rounds: how many rounds of sampling fill one batch at most.
    overlong_buffer: the last tokens of the allowed length, over which the length penalty grows.
    overlong_penalty: the penalty at the full length.
    overlong_filter: responses cut off at the full length do not contribute to the loss.
    """

    prompts_per_step: int = 128
    samples_per_prompt: int = 16
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 10.0
    mismatch_cap: float = 2.0
    normalize_by_std: bool = True
    dynamic_sampling: bool = True
    max_sampling_rounds: int = 10
    overlong_buffer: int = 4096
    overlong_penalty: float = 1.0
    overlong_filter: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "prompts_per_step", "max_sampling_rounds", "mismatch_cap")
        _at_least(self, 2, "samples_per_prompt")
        _at_least(self, 0, "clip_high", "overlong_buffer", "overlong_penalty")
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be within [0, 1), got {self.clip_low}")
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where prompts come from and how a response is scored.

    source: "reasoning_gym" makes its tasks; "jsonl" and "parquet" read `path`.
    path: the file, or a folder or glob pattern of files.
    task: name of the reasoning-gym task.
    task_config: settings of that task.
    prompt_column: column with the question: a string, or a list of chat messages.
    answer_column: column with the right answer; `reward_model.ground_truth` is looked up if there
      is no such column.
    tokenizer: folder with tokenizer.json; empty takes the checkpoint's, and without a checkpoint
      the one that ships with the package.
    chat_template: put questions into the tokenizer's chat template.
    system_prompt: message that goes before every question.
    max_prompt_tokens: longer prompts are left out.
    shuffle: read files in an order drawn from the run's seed, a new one every epoch.
    reward: "reasoning_gym" (the task's own scorer), "math", "exact", "regex", or "module:function".
    reward_pattern: for "regex": the last match is the response's answer (its first group, if any).
    """

    source: Literal["reasoning_gym", "jsonl", "parquet"] = "reasoning_gym"
    path: str = ""
    task: str = "chain_sum"
    task_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    tokenizer: str = ""
    chat_template: bool = True
    system_prompt: str = ""
    max_prompt_tokens: int = 2048
    shuffle: bool = True
    reward: str = "reasoning_gym"
    reward_pattern: str = ""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_prompt_tokens")
        if self.source != "reasoning_gym" and not self.path:
            raise ValueError(f'source = "{self.source}" needs a path')
        if self.reward == "reasoning_gym" and self.source != "reasoning_gym":
            raise ValueError(f'reward = "reasoning_gym" cannot score source = "{self.source}"')
        if self.reward == "regex" and not self.reward_pattern:
            raise ValueError('reward = "regex" needs a reward_pattern')


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What a run writes beside metrics.jsonl.

    progress: a progress bar within each step, on a terminal.
    tensorboard: TensorBoard events in the run folder.
    plot_every: steps between refreshes of the plots; 0 draws them at the end only.
    """

    progress: bool = True
    tensorboard: bool = True
    plot_every: int = 10

    def __post_init__(self) -> None:
        _at_least(self, 0, "plot_every")


@dataclasses.dataclass(frozen=True)
class ContractConfig:
    """What a run does when trainer and rollout disagree.

    on_difference: "stop" the run when a log-probability differs, or "warn" and go on.
    """

    on_difference: Literal["stop", "warn"] = "stop"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run.

    name: the run folder is runs_dir/name.
    seed: of weights, data order and sampling.
    runs_dir: folder of run folders.
    checkpoint: Hugging Face folder to start from; empty starts from random weights.
    steps: training steps, each a rollout batch and its updates.
    model: architecture; with a checkpoint it may be left out, and must agree if it is given.
    mesh: devices along the axes of the mesh.
    policy: every constant that can move a bit.
    sampler: drawing of responses.
    trainer: optimizer and step sizes.
    warm_start: supervised steps before reinforcement learning.
    algorithm: DAPO.
    data: prompts and rewards.
    report: what is written.
    contract: what a disagreement does.
    """

    name: str = "run"
    seed: int = 0
    runs_dir: str = "runs"
    checkpoint: str = ""
    steps: int = 100
    model: ModelConfig | None = None
    mesh: Layout = Layout()
    policy: Policy = Policy()
    sampler: SamplerConfig = SamplerConfig()
    trainer: TrainerConfig = TrainerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    report: ReportConfig = ReportConfig()
    contract: ContractConfig = ContractConfig()

    def __post_init__(self) -> None:
        _at_least(self, 0, "seed", "steps")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name must be a folder name, got {self.name!r}")
        if self.model is None and not self.checkpoint:
            raise ValueError("a run needs a checkpoint or a [model] section")
        algorithm, minibatch = self.algorithm, self.trainer.minibatch_prompts
        if algorithm.prompts_per_step % minibatch:
            raise ValueError(
                f"algorithm.prompts_per_step ({algorithm.prompts_per_step}) must be a multiple of "
                f"trainer.minibatch_prompts ({minibatch})"
            )
        tokens, chunk = self.trainer.microbatch_tokens, self.policy.chunk
        if tokens % chunk or tokens < self.max_length:
            raise ValueError(
                f"trainer.microbatch_tokens ({tokens}) must be a multiple of policy.chunk "
                f"({chunk}) and hold the longest sequence (data.max_prompt_tokens + "
                f"sampler.max_tokens = {self.max_length})"
            )
        if algorithm.overlong_buffer > self.sampler.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) exceeds "
                f"sampler.max_tokens ({self.sampler.max_tokens})"
            )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.runs_dir) / self.name

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.data.max_prompt_tokens + self.sampler.max_tokens


def resolve_model(config: RunConfig) -> ModelConfig:
    """The architecture of a run: its checkpoint's, or the [model] section.

    Raises:
      ValueError: if the two differ, naming every field that does.
      FileNotFoundError: if the checkpoint has no config.json.
    """
    if not config.checkpoint:
        assert config.model is not None  # RunConfig requires one of the two
        return config.model
    found = load_config(config.checkpoint)
    if config.model is None:
        return found
    names = (field.name for field in dataclasses.fields(ModelConfig))
    differences = [
        f"{name} is {getattr(found, name)} there and {getattr(config.model, name)} here"
        for name in names
        if getattr(found, name) != getattr(config.model, name) and not name.endswith(_NOT_SHAPES)
    ]
    if differences:
        raise ValueError(
            f"{config.checkpoint} is not the model of the [model] section: "
            + "; ".join(differences)
        )
    return found


# fields that a checkpoint may say differently without being another architecture
_NOT_SHAPES = ("token_id", "token_ids", "max_position_embeddings")
