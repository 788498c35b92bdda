"""Groups, dynamic sampling and examples, with a sampler that draws by a rule."""

import dataclasses

import numpy as np
import pytest

from isojax.config import AlgorithmConfig, SamplerConfig
from isojax.rl.dapo import Rollouts, collect, examples_of, request_of, rollout_metrics
from isojax.rl.data import Prompt
from isojax.rl.rewards import Rewards
from isojax.sampler.request import Completion

ALGORITHM = AlgorithmConfig(
    prompts_per_step=4, samples_per_prompt=3, overlong_buffer=2, max_sampling_rounds=5
)
SAMPLER = SamplerConfig(max_tokens=6, temperature=0.5)
RIGHT = ord("y")


class Letters:
    """A tokenizer of one token a letter."""

    eos_ids = (0,)

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)


class Stream:
    """Prompts whose answer is "y"; `index` counts them."""

    def __init__(self):
        self.position = 0

    def take(self, count):
        found = [
            Prompt(i, (1, 2, 3 + i % 5), "?", "y", {})
            for i in range(self.position, self.position + count)
        ]
        self.position += count
        return found


def completion(token: int, length: int, reason="stop", **fields) -> Completion:
    return Completion(
        np.full(length, token, np.int32),
        np.full(length, -0.5, np.float32),
        np.full(length, -np.inf, np.float32),
        reason,
        **fields,
    )


def generate_where(teaches):
    """Sample 0 of a prompt is wrong iff teaches(call number, place in the call)."""
    calls = []

    def generate(requests):
        calls.append(requests)
        return [
            [
                completion(ord("n") if i == 0 and teaches(len(calls), place) else RIGHT, 1)
                for i in range(request.n)
            ]
            for place, request in enumerate(requests)
        ]

    generate.calls = calls
    return generate


def right(response, answer, row):
    return float(response == answer)


def collected(generate, algorithm=ALGORITHM) -> tuple[Rollouts, Stream]:
    stream = Stream()
    found = collect(stream, generate, Rewards(right), Letters(), algorithm, SAMPLER, seed=7)
    return found, stream


def test_flat_groups_are_dropped_and_sampling_goes_on():
    generate = generate_where(lambda call, place: place % 2 == 0)
    rollouts, stream = collected(generate)
    # 4 prompts teach 2; the 2 that are missing are asked for at the rate of a half, and so on
    assert [len(requests) for requests in generate.calls] == [4, 4]
    assert [group.prompt.index for group in rollouts.groups] == [0, 2, 4, 6]
    assert (rollouts.rounds, rollouts.dropped, rollouts.surplus) == (2, 4, 0)
    assert stream.position == 8
    assert len(rollouts.sampled) == 8


def test_sampling_has_a_limit():
    rollouts, _ = collected(generate_where(lambda call, place: call == 1 and place == 0))
    assert rollouts.rounds == ALGORITHM.max_sampling_rounds
    assert len(rollouts.groups) == 4
    assert rollouts.groups[0].prompt.index == 0
    advantages = [e.advantage for e in examples_of(rollouts.groups, ALGORITHM, SAMPLER)]
    assert any(advantages[:3]) and not any(advantages[3:])


def test_without_dynamic_sampling_every_group_counts():
    algorithm = dataclasses.replace(ALGORITHM, dynamic_sampling=False)
    rollouts, _ = collected(generate_where(lambda call, place: False), algorithm)
    assert (rollouts.rounds, len(rollouts.groups), rollouts.dropped) == (1, 4, 0)


def test_a_request_depends_on_seed_and_prompt_alone():
    prompt = Prompt(11, (1, 2), "?", "y", {})
    one = request_of(prompt, 3, SAMPLER, (0,), seed=7)
    assert one == request_of(prompt, 3, SAMPLER, (0,), seed=7)
    others = (
        request_of(dataclasses.replace(prompt, index=12), 3, SAMPLER, (0,), seed=7),
        request_of(prompt, 3, SAMPLER, (0,), seed=8),
    )
    assert len({one.seed, *(other.seed for other in others)}) == 3
    assert (one.n, one.max_tokens, one.temperature, one.stop_ids) == (3, 6, 0.5, (0,))


def test_a_refused_prompt_is_an_error():
    def generate(requests):
        return [[completion(RIGHT, 0, "error", error="too long")] * 3 for _ in requests]

    with pytest.raises(RuntimeError, match="prompt 0: too long"):
        collected(generate)


def test_examples_carry_what_the_loss_needs():
    algorithm = dataclasses.replace(ALGORITHM, overlong_filter=True)

    def generate(requests):
        return [
            [completion(RIGHT, 1), completion(ord("n"), 2), completion(ord("n"), 6, "length")]
            for _ in requests
        ]

    rollouts, _ = collected(generate, algorithm)
    examples = examples_of(rollouts.groups, algorithm, SAMPLER)
    assert len(examples) == 12
    first, _, last = examples[:3]
    np.testing.assert_array_equal(first.tokens, [1, 2, 3, RIGHT])
    assert (first.prompt_length, first.inverse_temperature) == (3, 2.0)
    assert [e.weight for e in examples[:3]] == [1.0, 1.0, 0.0]
    # rewards 1, 0, 0 and the penalty of full length, -1: mean 0, standard deviation 1
    np.testing.assert_allclose([e.advantage for e in examples[:3]], [1, 0, -1], atol=1e-7)
    np.testing.assert_array_equal(last.threshold, np.full(6, -np.inf, np.float32))
    metrics = rollout_metrics(rollouts)
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["response_length_mean"] == 3.0
    assert metrics["response_truncated"] == pytest.approx(1 / 3)
    assert metrics["tokens_generated"] == 36
    assert metrics["entropy"] == 0.5
