"""Supervised warm start: an untrained model first imitates right answers."""

from collections.abc import Sequence

import numpy as np

from isojax.rl.data import Prompt, PromptStream
from isojax.trainer.packing import Example


def answers(stream: PromptStream, prompts: Sequence[Prompt]) -> list[Example]:
    """The prompts followed by their right answers, whose likelihood is to be raised.

    With advantage 1 and no older policy the policy loss has the gradient of maximum likelihood.
    """
    return [
        Example(
            tokens=np.asarray([*prompt.tokens, *stream.answer_tokens(prompt)], np.int32),
            prompt_length=len(prompt.tokens),
            advantage=1.0,
        )
        for prompt in prompts
    ]
