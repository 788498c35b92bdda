"""The whole model by kernels on a GPU: sampler, scorer and the forward inside the gradient."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from isojax import config_io
from isojax.mesh import Layout
from isojax.models.init import init_params
from isojax.sampler.config import EngineConfig
from isojax.sampler.engine import Engine
from isojax.sampler.request import Request
from isojax.trainer.loss import PolicyLoss
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer
from tests.test_meshes import examples_of
from tests.util import bits

CONFIG = Path(__file__).parents[1] / "configs" / "multi_gpu_check.toml"
LONGEST = 512
# lengths around the chunk and the page; a prompt of one token; one read in pieces
PROMPTS = ((17, 1.0), (1, 0.9), (130, 1.0), (300, 0.7), (64, 1.0), (63, 1.0))


@pytest.mark.gpu
def test_rollout_score_and_gradient_have_the_same_bits():
    config = config_io.load(CONFIG, {})
    layout = Layout()
    static = (config.model, config.policy, layout, layout.mesh())
    sizes = {"microbatch_tokens": LONGEST, "longest": LONGEST}
    trainer = Trainer(*static, AdamW(max_grad_norm=0.5), remat=True, **sizes)
    scorer = Scorer(*static, LONGEST, longest=LONGEST)
    state = trainer.init(init_params(*static, seed=0))
    model, policy, layout, mesh = static
    engine = Engine.create(
        state.params, model=model, policy=policy, layout=layout, mesh=mesh,
        config=EngineConfig(
            max_model_len=LONGEST, max_sequences=16, max_batch_tokens=512, bucket_sizes=1
        ),
    )  # fmt: skip
    random = np.random.default_rng(0)
    for step in range(2):
        requests = [
            Request(
                random.integers(0, model.vocab_size, length).tolist(), 20 + length % 60,
                temperature=0.8, top_p=top_p, n=2, seed=step, ignore_eos=True,
            )
            for length, top_p in PROMPTS
        ]  # fmt: skip
        done = engine.generate(requests)
        advantages = [[len(c.token_ids) % 5 - 2 for c in group] for group in done]
        examples = examples_of(requests, done, advantages)
        scored = scorer(state.params, examples)
        again = trainer.logprobs(state.params, examples, PolicyLoss())
        sampled = [completion for group in done for completion in group]
        for ours, own, inside in zip(sampled, scored, again, strict=True):
            assert np.isfinite(own.full).all()
            assert (bits(ours.logprobs) == bits(own.full)).all()
            assert (bits(inside.full) == bits(own.full)).all()
            assert (bits(inside.kept) == bits(own.kept)).all()
        examples = [
            dataclasses.replace(e, old_logp=s.kept) for e, s in zip(examples, scored, strict=True)
        ]
        state, result = trainer.step(state, examples, PolicyLoss(), Schedule(learning_rate=1e-3))
        assert np.isfinite(result.loss) and 0 < result.grad_norm < np.inf
        engine.update_params(state.params, step + 1)
    assert jax.devices()[0].platform == "gpu"
