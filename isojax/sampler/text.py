"""Text of a growing token sequence, and the stop strings in it."""

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

# how a detokenizer shows a character of which bytes are missing
_INCOMPLETE = "\ufffd"
# of one character in UTF-8; more tokens than that are not waiting for their last byte
_MOST_BYTES = 4


class StopWatch:
    """Watches the text of a response for stop strings.

    A token's text can depend on the tokens before it, so each new token is decoded together with
    the last ones whose text was complete, and what they alone give is taken off.
    """

    def __init__(self, stop: Sequence[str], detokenize: Detokenize) -> None:
        self._stop, self._detokenize = tuple(stop), detokenize
        self._longest = max(map(len, self._stop))
        self._tail = ""
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that is now complete, if any (the first that ends)."""
        self._new.append(token)
        known = self._detokenize(self._before)
        text = self._detokenize(self._before + self._new)
        if text.endswith(_INCOMPLETE) and len(self._new) < _MOST_BYTES:
            return None
        added = text[len(known) :]
        self._before, self._new = self._new, []
        text = self._tail + added
        found = [(text.find(s) + len(s), s) for s in self._stop if s in text]
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(found)[1] if found else None
