"""Stop strings in the text of a growing token sequence."""

import collections
from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]


class StopWatch:
    """Watches a response for stop strings, token by token.

    A token that has text has at least one byte of it. So a stop string of b bytes that has just
    been completed lies within the last b such tokens. These are decoded, with one more before them
    because a detokenizer may treat the first of its tokens differently (drop a leading space); what
    precedes them cannot change the valid text in them, however broken its bytes are.
    """

    def __init__(self, stop: Sequence[str], detokenize: Detokenize) -> None:
        self._stop, self._detokenize = tuple(stop), detokenize
        window = 1 + max(len(string.encode()) for string in self._stop)
        self._tail: collections.deque[int] = collections.deque(maxlen=window)

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that is now complete, if any (the first that ends)."""
        if not self._detokenize([token]):  # special tokens have no text
            return None
        self._tail.append(token)
        text = self._detokenize(list(self._tail))
        found = [(text.find(s) + len(s), s) for s in self._stop if s in text]
        return min(found)[1] if found else None
