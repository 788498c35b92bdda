"""Texts of programs, equal up to the integers that may differ."""

import dataclasses
from collections.abc import Collection

from isojax.contract.stablehlo import numbers

HOLE = "#"


@dataclasses.dataclass(frozen=True)
class Match:
    """How two texts compare.

    equal: apart from integers they are the same. pairs: the integers that differ, (left, right).
    where: the first place that differs otherwise.
    """

    equal: bool
    pairs: frozenset[tuple[int, int]] = frozenset()
    where: str = ""


def match(left: str, right: str) -> Match:
    """Compare two texts; integers may differ, names and floats may not."""
    if left == right:
        return Match(True)
    (words, ours), (others, theirs) = numbers(left), numbers(right)
    if len(words) != len(others):
        return Match(False, where=f"{len(words)} against {len(others)} pieces of text")
    for a, b in zip(words, others, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
            near = slice(max(0, at - 30), at + 30)
            return Match(False, where=f"{a[near]!r} against {b[near]!r}")
    pairs = frozenset(p for p in zip(ours, theirs, strict=True) if p[0] != p[1])
    return Match(True, pairs)


def erased(left: str, right: str) -> str | None:
    """The text that two sizes of one program share, a hole for every integer that differs.

    None if they differ in more than integers: then the program's structure counts rows.
    """
    if not match(left, right).equal:
        return None
    words, ours = numbers(left)
    _, theirs = numbers(right)
    out = [words[0]]
    for word, a, b in zip(words[1:], ours, theirs, strict=True):
        out += [str(a) if a == b else HOLE, word]
    return "".join(out)


def same(left: str, right: str, admitted: Collection[tuple[int, int]]) -> bool:
    """Whether two texts are equal but for pairs of integers that are admitted."""
    found = match(left, right)
    return found.equal and found.pairs <= frozenset(admitted)
