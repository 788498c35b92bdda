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
from typing import NamedTuple

import numpy as np

from isojax.sampler.pages import Pool
from isojax.sampler.request import Request


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request, or the prefix that `children` will fork from.

    order: age, (request, sample); a prefix is as old as its next child.
    tokens: prompt and what has been generated.
    limit: tokens at which it ends.
    key: uint32 [2] of its random bits.
    cached: how many of `tokens` lie in its pages and slot.
    """

    order: tuple[int, int]
    request: Request
    tokens: list[int]
    limit: int
    key: np.ndarray
    children: list["Sequence"] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    thresholds: list[float] = dataclasses.field(default_factory=list)
    cached: int = 0
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)

    def __lt__(self, other: "Sequence") -> bool:
        return self.order < other.order

    @property
    def missing(self) -> int:
        """Tokens that are not cached; 0 for a prefix that is ready."""
        return len(self.tokens) - self.cached


class Copies(NamedTuple):
    """What forks inherit by copy, as (from, to)."""

    pages: list[tuple[int, int]]
    slots: list[tuple[int, int]]


@dataclasses.dataclass
class Plan:
    """One rank's share of a call: sequences with their numbers of new tokens, after the copies."""

    work: list[tuple[Sequence, int]]
    copies: Copies

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.work)

    @property
    def single(self) -> bool:
        """Every sequence contributes one token."""
        return all(count == 1 for _, count in self.work)


class Rank:
    """The sequences, pages and slots of one data rank."""

    def __init__(self, pages: int, slots: int, chunk: int, prefill_budget: int) -> None:
        self.pages, self.slots = Pool(pages), Pool(slots)
        self.running: list[Sequence] = []  # oldest first
        self._chunk, self._prefill_budget = chunk, prefill_budget
        self._begin()

    def _begin(self) -> None:
        self._budget = self._prefill_budget
        self.planned = Plan([], Copies([], []))

    @property
    def room(self) -> int:
        """Free slots that no prefix will need for its samples."""
        return self.slots.free - sum(max(len(seq.children) - 1, 0) for seq in self.running)

    def plan(self) -> list[Sequence]:
        """Plan a call of the sequences that run; returns those that were preempted for it."""
        self._begin()
        # Forks first: what growth preempts later in this plan may have been copied from or to, but
        # no later copy can meet the same page, and copies are made before the call.
        for prefix in [seq for seq in self.running if seq.children and not seq.missing]:
            self._fork(prefix)
        preempted: list[Sequence] = []
        for seq in list(self.running):
            if seq.slot >= 0 and (count := self._count(seq)):
                self._grow(seq, seq.cached + count, preempted)
                if seq.slot >= 0:
                    self._add(seq, count)
        return preempted

    def fits(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can join the call."""
        pages = self._pages_for(len(seq.tokens))
        return self.room > 0 and pages <= self.pages.free and self._count(seq) > 0

    def admit(self, seq: Sequence) -> None:
        """Start a sequence that `fits`."""
        seq.slot = self.slots.take()
        seq.pages = [self.pages.take() for _ in range(self._pages_for(len(seq.tokens)))]
        bisect.insort(self.running, seq)
        self._add(seq, self._count(seq))

    def release(self, seq: Sequence) -> None:
        """Take back what a running sequence holds."""
        self.running.remove(seq)
        self.pages.drop(seq.pages)
        self.slots.drop([seq.slot])
        seq.pages, seq.slot, seq.cached = [], -1, 0

    def unblock(self) -> list[Sequence]:
        """When all that runs is prefixes which cannot fork for want of pages: the oldest one's
        first sample takes it over. Returns what has to wait: other samples, preempted prefixes."""
        prefix = self.running[0]
        first, *others = prefix.children
        self._take_over(prefix, first)
        waiting = [waiting_form(others)] if others else []
        self._grow(first, len(first.tokens), waiting)
        self._add(first, first.missing)
        return waiting

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._chunk)

    def _count(self, seq: Sequence) -> int:
        """New tokens in this call: one to decode always; a prompt within the budget, cut only at
        multiples of the chunk."""
        if seq.missing <= max(1, self._budget):
            return seq.missing
        return self._budget // self._chunk * self._chunk

    def _add(self, seq: Sequence, count: int) -> None:
        if count > 1:
            self._budget -= count
        self.planned.work.append((seq, count))

    def _grow(self, seq: Sequence, tokens: int, preempted: list[Sequence]) -> None:
        """Pages for `tokens` tokens, from the youngest if none is free, which may be `seq`."""
        while len(seq.pages) < self._pages_for(tokens):
            if self.pages.free:
                seq.pages.append(self.pages.take())
                continue
            victim = self.running[-1]
            self.release(victim)
            preempted.append(victim)
            if victim is seq:
                return

    def _fork(self, prefix: Sequence) -> None:
        """Start samples of a prefix that is ready, as far as slots and pages go."""
        full, rest = divmod(prefix.cached, self._chunk)
        while len(prefix.children) > 1 and self.slots.free and (self.pages.free or not rest):
            child = prefix.children.pop(0)
            child.slot, child.cached = self.slots.take(), prefix.cached
            child.pages = prefix.pages[:full]
            self.pages.share(child.pages)
            self.planned.copies.slots.append((prefix.slot, child.slot))
            if rest:
                child.pages.append(self.pages.take())
                self.planned.copies.pages.append((prefix.pages[full], child.pages[full]))
            self.running.append(child)
        prefix.order = prefix.children[0].order
        if len(prefix.children) == 1:
            self._take_over(prefix, prefix.children[0])
        self.running.sort()

    def _take_over(self, prefix: Sequence, child: Sequence) -> None:
        child.slot, child.pages, child.cached = prefix.slot, prefix.pages, prefix.cached
        self.running.remove(prefix)
        bisect.insort(self.running, child)


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

    def __init__(self, ranks: int, pages: int, slots: int, chunk: int, prefill_budget: int) -> None:
        self.ranks = [Rank(pages, slots, chunk, prefill_budget) for _ in range(ranks)]
        self.preemptions = 0
        self._waiting: list[Sequence] = []
        self._share = slots > 1

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
        if not any(rank.planned.work for rank in self.ranks):
            for rank in self.ranks:
                if rank.running:
                    self._wait(rank.unblock())
        return [rank.planned for rank in self.ranks]

    def release(self, seq: Sequence) -> None:
        """Forget a running sequence that has ended."""
        for rank in self.ranks:
            if seq in rank.running:
                rank.release(seq)

    def clear(self) -> None:
        """Forget every sequence."""
        for rank in self.ranks:
            for seq in list(rank.running):
                rank.release(seq)
        self._waiting.clear()

    def _wait(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            heapq.heappush(self._waiting, seq)
