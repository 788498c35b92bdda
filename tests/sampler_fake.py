"""An executor without a model: it keeps pages and slots in NumPy and hashes what it finds there.

The next token is a function of the prefix as read back through the page table, so a lost, stale or
foreign page, a wrong slot or a wrong copy changes what is sampled.
"""

import hashlib

import numpy as np

from isojax.sampler.executor import Sampled
from isojax.sampler.random import sample_key

VOCAB = 50


def digest(tokens, key) -> tuple[int, float]:
    """Next token and a log-probability after `tokens`."""
    data = np.asarray(tokens, np.int32).tobytes() + np.asarray(key, np.uint32).tobytes()
    h = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(h[:4], "little") % VOCAB, -float(h[4])


def expected(request, sample, max_model_len, eos=()):
    """What the fake must sample for a request, computed without pages: (tokens, logprobs)."""
    tokens, logprobs = list(request.prompt_ids), []
    key = sample_key(request.seed, sample)
    limit = min(len(tokens) + request.max_tokens, max_model_len)
    while len(tokens) < limit:
        token, logprob = digest(tokens, key)
        tokens.append(token)
        logprobs.append(logprob)
        if token in request.stop_ids or (token in eos and not request.ignore_eos):
            break
    return tokens[len(request.prompt_ids) :], logprobs


class Drawn(Sampled):
    """A call's results, there at once."""

    def wait(self) -> Sampled:
        return self


class FakeExecutor:
    """Pages hold token ids and slots the number of tokens seen, both poisoned until written."""

    def __init__(self, ranks: int, pages: int, slots: int, chunk: int) -> None:
        self.params, self.compiles, self.chunk = None, 0, chunk
        self.pages = np.full((ranks, pages, chunk), -1, np.int64)
        self.slots = np.full((ranks, slots), -1, np.int64)
        self.calls: list[tuple] = []
        self.follows = False  # whether this call follows one whose results are not known
        self.on_step = lambda: None

    def release(self) -> None:
        self.pages[:], self.slots[:] = -1, -1

    def copy(self, ranks) -> None:
        for rank, copies in enumerate(ranks):
            for pool, pairs in ((self.pages, copies.pages), (self.slots, copies.slots)):
                assert len({to for _, to in pairs}) == len(pairs), "two copies to one target"
                for source, to in pairs:
                    pool[rank, to] = pool[rank, source]

    def step(self, bucket, ranks, after=None) -> Drawn:
        self.follows = after is not None
        self.on_step()
        shape = (len(ranks), bucket.sequences)
        tokens, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.calls.append((bucket, [int((x.batch.length > 0).sum()) for x in ranks]))
        for rank, inputs in enumerate(ranks):
            b = inputs.batch
            assert b.tokens.shape == (bucket.tokens,) and b.piece_len.shape == (bucket.pieces,)
            assert b.piece_len.max() <= bucket.piece_rows and b.piece_len.sum() == b.length.sum()
            live = np.flatnonzero(b.length)
            if after is not None:
                assert bucket == self.calls[-2][0] and (b.length[live] == 1).all()
                b.tokens[: len(live)] = after.tokens[rank, : len(live)]
            assert len(set(b.slot[live])) == len(live), "two sequences in one slot"
            for s in live:
                rows = np.flatnonzero(b.seq == s)
                assert rows[0] == b.start[s] and len(rows) == b.length[s]
                assert inputs.row[s] == rows[-1]
                assert (b.positions[rows] == b.context[s] + np.arange(len(rows))).all()
                assert b.context[s] in (0, self.slots[rank, b.slot[s]]), "stale slot"
                page, place = divmod(b.positions[rows], self.chunk)
                self.pages[rank, b.page_table[s, page], place] = b.tokens[rows]
                self.slots[rank, b.slot[s]] = b.context[s] + b.length[s]
            for s in live:  # after all writes, as another's write must not reach these pages
                end = b.context[s] + b.length[s]
                at = np.arange(end)
                seen = self.pages[rank, b.page_table[s, at // self.chunk], at % self.chunk]
                assert (seen >= 0).all(), "unwritten page"
                assert inputs.settings.position[s] == end
                tokens[rank, s], logprobs[rank, s] = digest(seen, inputs.settings.key[s])
        return Drawn(tokens, logprobs, np.full(shape, -np.inf, np.float32))
