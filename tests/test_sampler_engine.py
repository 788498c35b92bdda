"""Scheduler, pages and engine against an executor without a model: every sample is what its prompt
and seed say, whatever shares the engine with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isojax.batch import Segment, build
from isojax.sampler.config import EngineConfig, buckets
from isojax.sampler.engine import Engine
from isojax.sampler.inputs import lay_out
from isojax.sampler.lanes import Lanes
from isojax.sampler.pages import Pool
from isojax.sampler.random import sample_key
from isojax.sampler.request import Request
from isojax.sampler.scheduler import Copies, Plan, Sequence
from tests.sampler_fake import VOCAB, FakeExecutor, expected

CHUNK = 4


def engine(ranks=1, eos=(), chunk=CHUNK, **config):
    usual = {"max_model_len": 40, "max_sequences": 4, "max_batch_tokens": 16}
    config = EngineConfig(**{**usual, **config})
    fake = FakeExecutor(ranks, config.pool(chunk), config.max_sequences, chunk)
    made = Engine(
        fake, config, vocab_size=VOCAB, chunk=chunk, ranks=ranks, eos_ids=eos,
        detokenize=lambda ids: "".join(chr(97 + i % 26) for i in ids),
    )  # fmt: skip
    return made, fake


def prompt(length, seed=0):
    return np.random.default_rng((seed, length)).integers(0, VOCAB, length).tolist()


def check(requests, made, eos=()):
    """Serve and compare with the definition; the engine must be empty afterwards."""
    done = made.generate(requests)
    for request, completions in zip(requests, done, strict=True):
        assert len(completions) == request.n
        for i, completion in enumerate(completions):
            tokens, logprobs = expected(request, i, made._config.max_model_len, eos)
            assert completion.error is None
            assert completion.token_ids.tolist() == tokens
            assert completion.logprobs.tolist() == logprobs
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == completion.thresholds.dtype == np.float32
    for rank in made._scheduler.ranks:
        assert rank.pages.free == rank.pages.size and rank.slots.free == rank.slots.size
    return done


def watch_pages(made, fake):
    """Before every call: who writes a page holds it alone; owners are counted right."""

    def look():
        for rank in made._scheduler.ranks:
            held = [0] * rank.pages.size
            for seq in rank.running:
                assert len(set(seq.pages)) == len(seq.pages)
                for page in seq.pages:
                    held[page] += 1
            assert held == [rank.pages.owners(page) for page in range(rank.pages.size)]
            for seq, count in zip(rank.planned.seqs, rank.planned.counts, strict=True):
                cached, known = rank.lanes.cached[seq.slot], rank.lanes.known[seq.slot]
                known += fake.follows
                assert (cached + count) % CHUNK == 0 or cached + count == known
                for page in seq.pages[cached // CHUNK : -(-(cached + count) // CHUNK)]:
                    assert rank.pages.owners(page) == 1

    fake.on_step = look


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 3),
    max_sequences=st.integers(1, 5),
    extra_pages=st.integers(0, 8),
    budget=st.integers(CHUNK, 24),
    sizes=st.integers(1, 3),
)
def test_every_request_is_served_exactly(data, ranks, max_sequences, extra_pages, budget, sizes):
    requests = [
        Request(
            prompt(data.draw(st.integers(1, 38)), data.draw(st.integers(0, 2))),
            max_tokens=data.draw(st.integers(1, 20)),
            n=data.draw(st.integers(1, 7)),
            seed=data.draw(st.integers(0, 3)),
        )
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    eos = (7,) if data.draw(st.booleans()) else ()
    made, fake = engine(
        ranks, eos, max_sequences=max_sequences, pages=10 + extra_pages,
        max_batch_tokens=max_sequences + budget, bucket_sizes=sizes,
    )  # fmt: skip
    watch_pages(made, fake)
    check(requests, made, eos)
    assert all(any(counts) for _, counts in fake.calls), "a call without work"


def test_tight_pool_preempts_and_changes_nothing():
    requests = [Request(prompt(9, s), 20, seed=s, n=3) for s in range(4)]
    roomy, _ = engine()
    tight, fake = engine(pages=10)
    watch_pages(tight, fake)
    check(requests, roomy)
    check(requests, tight)
    assert roomy.counts.preemptions == 0 and tight.counts.preemptions > 0
    assert roomy.counts.tokens == tight.counts.tokens == 4 * 3 * 20


def test_samples_share_their_prompt():
    made, fake = engine(max_batch_tokens=200)
    fed = []
    fake.on_step = lambda: fed.append(sum(made._scheduler.ranks[0].planned.counts))
    check([Request(prompt(30, s), 1, n=6) for s in range(5)], made)
    assert sum(fed) == 5 * (29 + 6)  # the prefix once, then each sample's last prompt token


def test_a_prefix_that_fills_the_pool_does_not_block():
    for requests in (1, 3):
        made, fake = engine(pages=10, max_batch_tokens=60)
        watch_pages(made, fake)
        check([Request(prompt(38, s), 2, n=4) for s in range(requests)], made)


def test_order_and_company_do_not_matter():
    requests = [Request(prompt(5 + 3 * s, s), 12, seed=s, n=1 + s % 3) for s in range(6)]
    alone = [engine()[0].generate([r])[0] for r in requests]
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5]):
        together = engine(ranks=2)[0].generate([requests[i] for i in order])
        for i, got in zip(order, together, strict=True):
            assert [c.token_ids.tolist() for c in got] == [c.token_ids.tolist() for c in alone[i]]


def test_sample_i_does_not_depend_on_n():
    few, many = (engine()[0].generate([Request(prompt(6), 9, n=n)])[0] for n in (2, 7))
    assert [c.token_ids.tolist() for c in few] == [c.token_ids.tolist() for c in many[:2]]
    assert len({tuple(c.token_ids.tolist()) for c in many}) == 7


def test_finish_reasons():
    made, _ = engine()
    plain = made.generate([Request(prompt(3), 12)])[0][0]
    ids = plain.token_ids.tolist()
    assert plain.finish_reason == "length" and plain.stop is None and len(ids) == 12
    (stopped,) = made.generate([Request(prompt(3), 12, stop_ids=[ids[4]])])[0]
    assert stopped.finish_reason == "stop" and stopped.stop == ids[4]
    assert stopped.token_ids.tolist() == ids[: ids.index(ids[4]) + 1]
    text = "".join(chr(97 + i % 26) for i in ids)
    (cut,) = made.generate([Request(prompt(3), 12, stop=["never!", text[5:8]])])[0]
    assert cut.finish_reason == "stop" and cut.stop == text[5:8]
    assert cut.token_ids.tolist() == ids[: text.index(text[5:8]) + 3]
    ends, _ = engine(eos=(ids[2],))
    end, on = (ends.generate([Request(prompt(3), 12, ignore_eos=x)])[0][0] for x in (False, True))
    assert end.stop == ids[2] and on.token_ids.tolist() == ids
    long, _ = engine(max_model_len=10)
    (cut,) = long.generate([Request(prompt(3), 12)])[0]
    assert cut.finish_reason == "length" and cut.token_ids.tolist() == ids[:7]


BAD = {
    "empty prompt": Request([], 4),
    "nested prompt": Request([[1, 2]], 4),  # type: ignore[list-item]
    "ragged prompt": Request([[1], [2, 3]], 4),  # type: ignore[list-item]
    "float prompt": Request([1.5], 4),  # type: ignore[list-item]
    "too long": Request([1] * 40, 4),
    "outside": Request([1, VOCAB], 4),
    "negative token": Request([-1], 4),
    "nan temperature": Request([1], 4, temperature=float("nan")),
    "infinite temperature": Request([1], 4, temperature=float("inf")),
    "negative temperature": Request([1], 4, temperature=-0.5),
    "tiny temperature": Request([1], 4, temperature=1e-40),
    "top_p 0": Request([1], 4, top_p=0.0),
    "top_p 2": Request([1], 4, top_p=2.0),
    "min_p": Request([1], 4, min_p=1.5),
    "top_k": Request([1], 4, top_k=-1),
    "max_tokens": Request([1], 0),
    "n": Request([1], 4, n=0),
    "seed": Request([1], 4, seed=2**64),
    "stop": Request([1], 4, stop=[""]),
    "stop id": Request([1], 4, stop_ids=[VOCAB]),
    "text": Request([1], 4, temperature="hot"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_its_own_error(name):
    good = Request(prompt(5), 6)
    made, _ = engine()
    bad, fine = made.generate([BAD[name], good])
    assert len(bad) == 1 and bad[0].finish_reason == "error" and bad[0].error
    assert bad[0].token_ids.size == 0
    assert fine[0].token_ids.tolist() == expected(good, 0, 40)[0]


def test_a_request_that_never_fits_the_pool_is_refused():
    made, _ = engine(pages=5)
    too_much, fits = made.generate([Request(prompt(10), 12), Request(prompt(10), 11)])
    assert "6 pages" in too_much[0].error and "5" in too_much[0].error
    assert fits[0].finish_reason == "length"


def test_logits_that_are_not_finite_end_their_request_only():
    made, fake = engine()
    step = fake.step

    def broken(bucket, ranks, after=None):
        out = step(bucket, ranks, after)
        out.logprobs[0, ranks[0].settings.position == 8] = np.nan
        return out

    fake.step = broken
    bad, good = made.generate([Request(prompt(5), 6), Request(prompt(1), 4)])
    assert bad[0].finish_reason == "error" and "position 8" in bad[0].error
    assert bad[0].token_ids.tolist() == expected(Request(prompt(5), 3), 0, 40)[0]
    assert good[0].finish_reason == "length"


def test_calls_follow_each_other_until_something_ends():
    made, fake = engine(ranks=2, max_batch_tokens=40)
    follows = []
    fake.on_step = lambda: follows.append(fake.follows)
    check([Request(prompt(3, s), 12, seed=s) for s in range(4)], made)
    # the prompts' call, its first decode call and, at the limit, none more than 12 tokens need
    assert follows == [False, False, *[True] * 10]
    follows.clear()
    ends = expected(Request(prompt(3, 0), 12), 0, 40)[0][4]
    check([Request(prompt(3, s), 12, seed=s, stop_ids=[ends]) for s in range(4)], made)
    assert 1 < sum(follows) < len(follows) - 2


def test_a_rank_that_empties_takes_what_waits():
    made, fake = engine(ranks=2, max_sequences=1, max_batch_tokens=30)
    watch_pages(made, fake)
    # the second one ends at a stop id, while calls of the first one could follow to the end
    ends = expected(Request(prompt(3, 1), 3, seed=1), 0, 40)[0][-1]
    short = [Request(prompt(3, s), 30, seed=s, stop_ids=[ends]) for s in (1, 2)]
    check([Request(prompt(3, 0), 30), *short], made)
    assert made.counts.steps == 30


def test_closing_the_stream_leaves_a_clean_engine():
    made, _ = engine()
    requests = [Request(prompt(7, s), 9, n=2) for s in range(4)]
    stream = made.stream(requests)
    first = next(stream)
    assert (
        first.completion.token_ids.tolist()
        == expected(requests[first.request], first.sample, 40)[0]
    )
    with pytest.raises(RuntimeError):
        made.update_params({}, 2)
    with pytest.raises(RuntimeError):
        made.release_cache()
    with pytest.raises(RuntimeError):
        made.generate([])
    stream.close()
    made.update_params("new", 2)
    made.release_cache()
    done = check(requests, made)
    assert done[0][0].weights_version == 2


def test_configuration_is_checked():
    with pytest.raises(ValueError, match="max_batch_tokens"):
        engine(max_batch_tokens=7)
    for name in ("max_sequences", "max_model_len", "bucket_sizes"):
        with pytest.raises(ValueError, match=name):
            EngineConfig(**{"max_model_len": 8, name: 0})


def test_buckets_are_few_and_ordered():
    config = EngineConfig(100, max_sequences=16, max_batch_tokens=1024, bucket_sizes=3)
    shapes = buckets(config, 64)
    assert [(b.tokens, b.piece_rows) for b in shapes] == [
        (1, 1), (4, 1), (16, 1), (256, 64), (1024, 64),
    ]  # fmt: skip
    assert all(b.pages == 2 for b in shapes)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_layout_is_what_build_makes(data):
    chunk, lanes = 4, Lanes(6, 40, 10)
    single = data.draw(st.booleans())
    slots = data.draw(st.permutations(range(6)))
    plan, segments, page = Plan([], [], Copies([], [])), [], 0
    for i in range(data.draw(st.integers(1, 5))):
        context = data.draw(st.integers(0, 20))
        count = 1 if single else data.draw(st.integers(1, 12))
        tokens = prompt(context + count, i)
        pages = list(range(page, page + -(-len(tokens) // chunk)))
        page += len(pages)
        seq = Sequence((i, 0), Request(tokens, 1), tokens, 40, sample_key(i, 0))
        seq.slot, seq.pages = slots[i], pages
        lanes.enter(seq, context)
        plan.seqs.append(seq)
        plan.counts.append(count)
        segments.append(Segment(tokens[context:], context, pages, slots[i]))
    config = EngineConfig(40, max_sequences=6, max_batch_tokens=70, bucket_sizes=1)
    bucket = buckets(config, chunk)[0 if single else 1]
    got = lay_out(lanes, plan, bucket, chunk)
    want = build(segments, bucket, chunk)
    for name, x in vars(want).items():
        y = getattr(got.batch, name)
        assert np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype, name


def test_pool_refuses_what_would_corrupt_it():
    pool = Pool(2)
    a = pool.take()
    pool.share([a])
    pool.drop([a])
    assert pool.free == 1
    pool.drop([a])
    with pytest.raises(ValueError):
        pool.drop([a])
    with pytest.raises(ValueError):
        pool.share([a])
    pool.take(), pool.take()
    with pytest.raises(IndexError):
        pool.take()
