"""One DAPO step's data: groups of samples, rewards, dynamic sampling, advantages, examples.

Yu et al., 2025, arXiv:2503.14476. Which prompts, seeds and therefore samples a step sees is a
function of the stream's position, the run's seed and the weights.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from isojax.config import AlgorithmConfig, SamplerConfig
from isojax.rl.advantages import (
    DynamicBatch,
    contributes,
    group_advantages,
    overlong_penalties,
)
from isojax.rl.data import Prompt, PromptStream
from isojax.rl.rewards import Rewards
from isojax.sampler.request import Completion, Request, inverse_temperature
from isojax.tokenizer import Tokenizer, cut_at_stop
from isojax.trainer.packing import Example

# requests -> n completions for each, in order
Generate = Callable[[Sequence[Request]], list[list[Completion]]]

# a round asks for at most this many times the groups that are missing
_MOST_PER_MISSING = 4


@dataclasses.dataclass(frozen=True)
class Group:
    """All samples of one prompt, and the task's reward of each, float32 [n]."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A full rollout batch, and what was sampled on the way to it.

    groups: the batch. sampled: every group of the step, those that were dropped included.
    rounds: of sampling. dropped: groups without variance. surplus: groups that came too late.
    """

    groups: list[Group]
    sampled: list[Group]
    rounds: int
    dropped: int
    surplus: int


def collect(
    stream: PromptStream,
    generate: Generate,
    rewards: Rewards,
    tokenizer: Tokenizer,
    algorithm: AlgorithmConfig,
    sampler: SamplerConfig,
    seed: int,
) -> Rollouts:
    """Sample groups until the rollout batch is full.

    With dynamic sampling, groups whose rewards are all alike are dropped, and further rounds ask
    for what is missing, in proportion to the share that was dropped so far.

    Raises:
      RuntimeError: the engine refused a prompt.
    """
    batch: DynamicBatch[Group] = DynamicBatch(
        algorithm.prompts_per_step,
        algorithm.max_sampling_rounds,
        keep_all=not algorithm.dynamic_sampling,
    )
    sampled: list[Group] = []
    while batch.missing:
        kept = algorithm.prompts_per_step - batch.missing
        share = max(kept / len(sampled), 1 / _MOST_PER_MISSING) if sampled else 1.0
        prompts = stream.take(math.ceil(batch.missing / share))
        groups = sample_groups(prompts, generate, rewards, tokenizer, algorithm, sampler, seed)
        batch.add(groups, np.stack([group.rewards for group in groups]))
        sampled += groups
    return Rollouts(batch.take(), sampled, batch.rounds, batch.dropped, batch.surplus)


def sample_groups(
    prompts: Sequence[Prompt],
    generate: Generate,
    rewards: Rewards,
    tokenizer: Tokenizer,
    algorithm: AlgorithmConfig,
    sampler: SamplerConfig,
    seed: int,
) -> list[Group]:
    """n samples of each prompt, scored."""
    requests = [
        request_of(prompt, algorithm.samples_per_prompt, sampler, tokenizer.eos_ids, seed)
        for prompt in prompts
    ]
    found = generate(requests)
    for prompt, completions in zip(prompts, found, strict=True):
        for completion in completions:
            if completion.finish_reason == "error":
                raise RuntimeError(f"prompt {prompt.index}: {completion.error}")
    texts = [
        cut_at_stop(tokenizer.decode(completion.token_ids.tolist()), sampler.stop)
        for completions in found
        for completion in completions
    ]
    each = [prompt for prompt, completions in zip(prompts, found, strict=True) for _ in completions]
    scores = rewards.score(each, texts).reshape(len(prompts), algorithm.samples_per_prompt)
    return [
        Group(prompt, tuple(completions), row)
        for prompt, completions, row in zip(prompts, found, scores, strict=True)
    ]


def request_of(
    prompt: Prompt, samples: int, sampler: SamplerConfig, stop_ids: Sequence[int], seed: int
) -> Request:
    """The request for a prompt's group; its seed is drawn from (seed, the prompt's index)."""
    drawn = np.random.SeedSequence([seed, prompt.index]).generate_state(1, np.uint64)[0]
    return Request(
        prompt_ids=prompt.tokens,
        max_tokens=sampler.max_tokens,
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        min_p=sampler.min_p,
        seed=int(drawn),
        n=samples,
        stop_ids=stop_ids,
        stop=sampler.stop,
    )


def examples_of(
    groups: Sequence[Group], algorithm: AlgorithmConfig, sampler: SamplerConfig
) -> list[Example]:
    """One example a sample, groups in order, without `old_logp`.

    Advantages are relative to the group, of the task's reward plus the penalty for length.
    """
    lengths = np.asarray([[len(c.token_ids) for c in group.completions] for group in groups])
    truncated = [[c.finish_reason == "length" for c in group.completions] for group in groups]
    shaped = np.stack([group.rewards for group in groups]) + overlong_penalties(
        lengths,
        max_tokens=sampler.max_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )
    advantages = group_advantages(shaped, normalize_by_std=algorithm.normalize_by_std)
    weights = contributes(np.asarray(truncated), overlong_filter=algorithm.overlong_filter)
    return [
        Example(
            tokens=np.concatenate([group.prompt.tokens, completion.token_ids]).astype(np.int32),
            prompt_length=len(group.prompt.tokens),
            inverse_temperature=float(inverse_temperature(sampler.temperature)),
            threshold=completion.thresholds,
            advantage=float(advantage),
            weight=float(weight),
        )
        for group, row, kept in zip(groups, advantages, weights, strict=True)
        for completion, advantage, weight in zip(group.completions, row, kept, strict=True)
    ]


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """What the samples of a step were like, dropped groups included.

    entropy: mean of -log p over sampled tokens, nats: an unbiased estimate of the policy's entropy
    at the sampling temperature.
    """
    completions = [c for group in rollouts.sampled for c in group.completions]
    rewards = np.concatenate([group.rewards for group in rollouts.sampled]).astype(np.float64)
    lengths = np.asarray([len(c.token_ids) for c in completions])
    logprobs = np.concatenate([c.logprobs for c in completions]).astype(np.float64)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_length_mean": float(lengths.mean()),
        "response_truncated": float(np.mean([c.finish_reason == "length" for c in completions])),
        "tokens_generated": int(lengths.sum()),
        "entropy": float(-logprobs.mean()),
        "rounds": rollouts.rounds,
        "groups_sampled": len(rollouts.sampled),
        "groups_dropped": rollouts.dropped,
        "groups_surplus": rollouts.surplus,
    }
