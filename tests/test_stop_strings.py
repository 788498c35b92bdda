import random

import pytest

from isojax.sampler.text import StopWatch
from isojax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer()


def first_stop(tokenizer, ids, stop):
    """(how many tokens it took, the stop string)."""
    watch = StopWatch(stop, tokenizer.decode)
    for count, token in enumerate(ids, 1):
        if found := watch.push(token):
            return count, found
    return None


def test_agrees_with_decoding_everything(tiny):
    """Random tokens; invalid UTF-8 and special tokens are among them."""
    generator = random.Random(0)
    alphabet = 4 * tiny.encode("the answer é 漢 ab") + [0, 1] + list(range(3, 259, 17))
    found = 0
    for _ in range(600):
        ids = [generator.choice(alphabet) for _ in range(generator.randint(1, 24))]
        stop = generator.sample(["é", "ab", "r é", "漢", "\n", "answer", " 漢 a"], 2)
        counts = (n for n in range(1, len(ids) + 1) if any(s in tiny.decode(ids[:n]) for s in stop))
        expected = next(counts, None)
        got = first_stop(tiny, ids, stop)
        assert (got and got[0]) == expected
        found += expected is not None
    assert found > 60


def test_within_a_token_and_across_tokens(tiny):
    (token,) = tiny.encode(" answer")
    assert first_stop(tiny, [token], ["x", "nsw"]) == (1, "nsw")
    ids = tiny.encode("4 + 3 = 7\n\n")
    assert first_stop(tiny, ids, ["\n\n", "= 7"])[1] == "= 7"


def test_special_tokens_between_its_tokens_do_not_hide_it(tiny):
    a, b = tiny.encode("4"), tiny.encode("2")
    assert first_stop(tiny, [*a, *[1] * 9, *b], ["42"]) == (11, "42")


def test_a_broken_character_before_it_does_not_delay_it(tiny):
    broken = tiny.encode("漢")[:-1]
    assert first_stop(tiny, [*broken, *broken, *tiny.encode("7")], ["7"])[1] == "7"
