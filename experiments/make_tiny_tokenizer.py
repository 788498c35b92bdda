"""Make the tokenizer that ships with the package: byte-level BPE of 512 tokens.

It is trained on easy reasoning-gym questions and their answers, so the words of a question are
mostly one token each; digits stand alone. Ids 0, 1, 2: <|endoftext|>, <|im_start|>, <|im_end|>.

usage: python experiments/make_tiny_tokenizer.py [FOLDER]
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from isojax.tokenizer import TINY

VOCAB_SIZE = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TASKS = [
    "basic_arithmetic", "chain_sum", "coin_flip", "count_bits", "gcd", "lcm", "letter_counting",
    "products", "simple_equations", "spell_backward", "time_intervals",
]  # fmt: skip
QUESTIONS = 300  # of each task
# one digit; a word with its space; a run of punctuation with its space; white space
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def corpus() -> Iterator[str]:
    for role in ("system", "user", "assistant"):
        yield from [role] * QUESTIONS
    for task in TASKS:
        for entry in reasoning_gym.create_dataset(task, size=QUESTIONS, seed=0):
            yield entry["question"]
            yield str(entry["answer"])


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TINY
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
