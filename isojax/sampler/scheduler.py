"""Continuous batching: which sequences run on which data rank, and with how many new tokens.

Sequences are served by age (request, sample). Running ones come first: every decoding sequence gets
its token, prompts share a budget. A page that is missing is taken from the youngest sequence of the
rank, which is preempted: it waits, and its tokens, generated ones included, are prefilled again.
Randomness is keyed by position, so its samples do not change.

The samples of one prompt share its prefill. Such a prompt first runs as a prefix of all its tokens
but the last; then each sample forks from it: it shares the full pages, copies the page that is not
full and the slot, and starts with the prompt's last token. The last sample takes the prefix over.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from isojax.sampler.lanes import Lanes
from isojax.sampler.pages import Pool
from isojax.sampler.request import Request

_NONE = partial(np.zeros, 0, np.float32)


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request, or the prefix that `children` will fork from.

    order: age, (request, sample); a prefix is as old as its next child.
    tokens: prompt and what has been generated; while it runs its lane knows of more.
    limit: tokens at which it ends.
    key: uint32 [2] of its random bits.
    stop_ids: token ids that end it.
    logprobs, thresholds: float32, of the generated tokens.
    slot, pages: what it holds; slot is -1 while it waits.
    """

    order: tuple[int, int]
    request: Request
    tokens: list[int]
    limit: int
    key: np.ndarray
    stop_ids: tuple[int, ...] = ()
    children: list["Sequence"] = dataclasses.field(default_factory=list)
    logprobs: np.ndarray = dataclasses.field(default_factory=_NONE)
    thresholds: np.ndarray = dataclasses.field(default_factory=_NONE)
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)

    def __lt__(self, other: "Sequence") -> bool:
        return self.order < other.order


class Copies(NamedTuple):
    """What forks inherit by copy, as (from, to)."""

    pages: list[tuple[int, int]]
    slots: list[tuple[int, int]]


@dataclasses.dataclass
class Plan:
    """One rank's share of a call: sequences, how many new tokens each contributes, and copies to be
    made before."""

    seqs: list[Sequence]
    counts: list[int]
    copies: Copies

    @property
    def slots(self) -> np.ndarray:
        """int32 [sequences]."""
        return np.fromiter((seq.slot for seq in self.seqs), np.int32, len(self.seqs))


class Rank:
    """The sequences, pages and slots of one data rank."""

    def __init__(self, pages: int, lanes: Lanes, chunk: int, prefill_budget: int) -> None:
        self.lanes = lanes
        self.pages, self.slots = Pool(pages), Pool(len(lanes.known))
        self.running: list[Sequence] = []  # oldest first
        self._prefixes: list[Sequence] = []  # those of `running` that have children
        self._chunk, self._prefill_budget = chunk, prefill_budget
        self._begin()

    def _begin(self) -> None:
        self._budget = self._prefill_budget
        self.planned = Plan([], [], Copies([], []))
        self._steady, self._slots = False, self.planned.slots

    @property
    def room(self) -> int:
        """Free slots that no prefix will need for its samples."""
        return self.slots.free - sum(len(prefix.children) - 1 for prefix in self._prefixes)

    def plan(self) -> list[Sequence]:
        """Plan a call of the sequences that run; returns those that were preempted for it."""
        if self._steady and len(self._starting()) <= self.pages.free:
            self.repeat()
            return []
        self._begin()
        # Forks first: what growth preempts later in this plan may have been copied from or to, but
        # no later copy can meet the same page, and copies are made before the call.
        for prefix in sorted(self._prefixes):
            if not self._missing(prefix):
                self._fork(prefix)
        preempted: list[Sequence] = []
        for seq in list(self.running):
            if seq.slot >= 0 and (count := self._count(self._missing(seq))):
                self._grow(seq, int(self.lanes.cached[seq.slot]) + count, preempted)
                if seq.slot >= 0:
                    self._add(seq, count)
        # A call in which all that runs decodes is followed by one just like it, until something
        # ends, starts or is short of pages.
        decodes = len(self.planned.seqs) == len(self.running) and set(self.planned.counts) == {1}
        self._steady, self._slots = decodes and not self._prefixes, self.planned.slots
        return preempted

    def goes_on(self) -> bool:
        """Whether a call can follow the last one before that one's results are known: it is steady,
        has pages to follow it, and brings no sequence to its limit."""
        if not self.running:
            return not self.planned.seqs  # or what ran there has left room for others
        if not self._steady:
            return False
        ends = self.lanes.known[self._slots] + 1 >= self.lanes.limit[self._slots]
        return not ends.any() and len(self._starting()) <= self.pages.free

    def fits(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can join the call."""
        tokens = len(seq.tokens)
        if self.room <= 0 or self._pages_for(tokens) > self.pages.free:
            return False
        return self._count(tokens) > 0

    def admit(self, seq: Sequence) -> None:
        """Start a sequence that `fits`."""
        seq.slot = self.slots.take()
        seq.pages = [self.pages.take() for _ in range(self._pages_for(len(seq.tokens)))]
        self._run(seq, 0)
        self._add(seq, self._count(len(seq.tokens)))

    def release(self, seq: Sequence) -> None:
        """Take back what a running sequence holds."""
        self.lanes.leave(seq)
        self._stop(seq)
        self.pages.drop(seq.pages)
        self.slots.drop([seq.slot])
        seq.pages, seq.slot = [], -1

    def unblock(self) -> list[Sequence]:
        """When all that runs is prefixes which cannot fork for want of pages: the oldest one's
        first sample takes it over. Returns what has to wait: other samples, preempted prefixes."""
        prefix = self.running[0]
        first, *others = prefix.children
        self._take_over(prefix, first)
        waiting = [waiting_form(others)] if others else []
        self._grow(first, len(first.tokens), waiting)
        self._add(first, 1)
        return waiting

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._chunk)

    def _missing(self, seq: Sequence) -> int:
        """Tokens of a running sequence that are not cached; 0 for a prefix that is ready."""
        return int(self.lanes.known[seq.slot] - self.lanes.cached[seq.slot])

    def _count(self, missing: int) -> int:
        """New tokens in this call: one to decode always; a prompt within the budget, cut only at
        multiples of the chunk."""
        if missing <= 1 or missing <= self._budget:
            return missing
        return self._budget // self._chunk * self._chunk

    def _add(self, seq: Sequence, count: int) -> None:
        if count > 1:
            self._budget -= count
        self.planned.seqs.append(seq)
        self.planned.counts.append(count)

    def _run(self, seq: Sequence, cached: int) -> None:
        self._steady = False
        self.lanes.enter(seq, cached)
        bisect.insort(self.running, seq)
        if seq.children:
            self._prefixes.append(seq)

    def _stop(self, seq: Sequence) -> None:
        self._steady = False
        self.running.remove(seq)
        if seq.children:
            self._prefixes.remove(seq)

    def _starting(self) -> list[Sequence]:
        """Sequences of the last plan whose next token starts a page."""
        cached = self.lanes.cached[self._slots]
        return [self.planned.seqs[i] for i in np.flatnonzero(cached % self._chunk == 0).tolist()]

    def repeat(self) -> None:
        """Plan the last call once more, with a page for each sequence that starts one."""
        for seq in self._starting():
            self._add_page(seq)
        self.planned.copies = Copies([], [])

    def _add_page(self, seq: Sequence) -> None:
        page = self.pages.take()
        self.lanes.pages[seq.slot, len(seq.pages)] = page
        seq.pages.append(page)

    def _grow(self, seq: Sequence, tokens: int, preempted: list[Sequence]) -> None:
        """Pages for `tokens` tokens, from the youngest if none is free, which may be `seq`."""
        while len(seq.pages) < self._pages_for(tokens):
            if self.pages.free:
                self._add_page(seq)
                continue
            victim = self.running[-1]
            self.release(victim)
            preempted.append(victim)
            if victim is seq:
                return

    def _fork(self, prefix: Sequence) -> None:
        """Start samples of a prefix that is ready, as far as slots and pages go."""
        cached = int(self.lanes.cached[prefix.slot])
        full, rest = divmod(cached, self._chunk)
        self._stop(prefix)  # its age changes
        while len(prefix.children) > 1 and self.slots.free and (self.pages.free or not rest):
            child = prefix.children.pop(0)
            child.slot = self.slots.take()
            child.pages = prefix.pages[:full]
            self.pages.share(child.pages)
            self.planned.copies.slots.append((prefix.slot, child.slot))
            if rest:
                child.pages.append(self.pages.take())
                self.planned.copies.pages.append((prefix.pages[full], child.pages[full]))
            self._run(child, cached)
        prefix.order = prefix.children[0].order
        self._run(prefix, cached)
        if len(prefix.children) == 1:
            self._take_over(prefix, prefix.children[0])

    def _take_over(self, prefix: Sequence, child: Sequence) -> None:
        cached = int(self.lanes.cached[prefix.slot])
        self._stop(prefix)
        child.slot, child.pages = prefix.slot, prefix.pages
        self._run(child, cached)


def waiting_form(samples: list[Sequence]) -> Sequence:
    """What waits for samples of a prompt that have not started: their prefix, or the only one."""
    first = samples[0]
    if len(samples) == 1:
        return first
    return Sequence(
        first.order, first.request, first.tokens[:-1], first.limit, first.key, children=samples
    )


class Scheduler:
    """All data ranks, and the sequences that wait for one of them."""

    def __init__(self, lanes: Iterable[Lanes], pages: int, chunk: int, prefill_budget: int) -> None:
        """lanes: of each data rank. pages: in each one's pool."""
        self.ranks = [Rank(pages, own, chunk, prefill_budget) for own in lanes]
        self.preemptions = 0
        self._waiting: list[Sequence] = []
        self._share = self.ranks[0].slots.size > 1

    def add(self, samples: list[Sequence]) -> None:
        """Queue all samples of one request."""
        share = self._share and len(samples[0].tokens) > 1
        self._wait([waiting_form(samples)] if share else samples)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(rank.running for rank in self.ranks)

    def plan(self) -> list[Plan]:
        """The next call, one plan a rank; while `busy` at least one has work."""
        for rank in self.ranks:
            preempted = rank.plan()
            self.preemptions += len(preempted)
            self._wait(preempted)
        while self._waiting:
            able = [rank for rank in self.ranks if rank.fits(self._waiting[0])]
            if not able:
                break
            # the emptiest rank; the first of equals
            max(able, key=lambda rank: rank.room).admit(heapq.heappop(self._waiting))
        if not any(rank.planned.seqs for rank in self.ranks):
            for rank in self.ranks:
                if rank.running:
                    self._wait(rank.unblock())
        return [rank.planned for rank in self.ranks]

    def follow(self) -> list[Plan] | None:
        """A call like the one that is still under way, to come after it; None if not every rank
        `goes_on`.

        A sequence that ends in the call under way in another way than at its limit is in the next
        one too, where what it draws means nothing. What waits found no room in the call under way,
        and finds none in one that is like it.
        """
        if not all(rank.goes_on() for rank in self.ranks):
            return None
        for rank in self.ranks:
            rank.repeat()
        return [rank.planned for rank in self.ranks]

    def clear(self) -> None:
        """Forget every sequence."""
        for rank in self.ranks:
            for seq in list(rank.running):
                rank.release(seq)
        self._waiting.clear()

    def _wait(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            heapq.heappush(self._waiting, seq)
