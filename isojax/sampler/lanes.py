"""The running sequences of one data rank as arrays over its slots.

Continuous batching touches every running sequence at every step; as rows of arrays that takes a few
NumPy operations instead of a Python loop.
"""

from typing import TYPE_CHECKING

import numpy as np

from isojax.sampler.request import inverse_temperature

if TYPE_CHECKING:
    from isojax.sampler.scheduler import Sequence


class Lanes:
    """Row `slot` describes the sequence that holds the slot.

    tokens int32, logprobs, thresholds float32 [slots, max_model_len]: by position, prompt included;
      a prompt has no logprobs. known, cached int32 [slots]: how many tokens there are, and how many
      of them lie in pages and slot. limit int32 [slots]: tokens at which it ends.
    pages int32 [slots, table_width].
    samples bool [slots]: tokens are sampled after it, i.e. it is no prefix.
    stop_ids int32 [slots, most stop ids of a sequence so far]: ids that end it; -1 where none.
    watched bool [slots]: it has stop strings.
    inverse_temperature, key, greedy, top_k, top_p, min_p [slots]: see `sampling.Settings`.
    """

    def __init__(self, slots: int, max_model_len: int, table_width: int) -> None:
        self.tokens = np.zeros((slots, max_model_len), np.int32)
        self.logprobs = np.zeros((slots, max_model_len), np.float32)
        self.thresholds = np.zeros((slots, max_model_len), np.float32)
        self.pages = np.zeros((slots, table_width), np.int32)
        self.known, self.cached, self.limit = (np.zeros(slots, np.int32) for _ in range(3))
        self.stop_ids = np.full((slots, 1), -1, np.int32)
        self.samples, self.watched = (np.zeros(slots, bool) for _ in range(2))
        self.inverse_temperature = np.ones(slots, np.float32)
        self.key = np.zeros((slots, 2), np.uint32)
        self.greedy, self.top_k = (np.zeros(slots, np.int32) for _ in range(2))
        self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(2))

    def enter(self, seq: "Sequence", cached: int) -> None:
        """Fill the row of a sequence that has slot and pages, `cached` tokens of it in them."""
        slot, request, known = seq.slot, seq.request, len(seq.tokens)
        self.tokens[slot, :known] = seq.tokens
        sampled = slice(known - len(seq.logprobs), known)
        self.logprobs[slot, sampled] = seq.logprobs
        self.thresholds[slot, sampled] = seq.thresholds
        self.pages[slot, : len(seq.pages)] = seq.pages
        self.known[slot], self.cached[slot], self.limit[slot] = known, cached, seq.limit
        self.samples[slot] = not seq.children
        self._set_stop_ids(slot, seq.stop_ids)
        self.watched[slot] = len(request.stop) > 0
        self.inverse_temperature[slot] = inverse_temperature(request.temperature)
        self.key[slot] = seq.key
        self.greedy[slot] = request.temperature == 0
        self.top_k[slot] = min(request.top_k, np.iinfo(np.int32).max)
        self.top_p[slot] = request.top_p
        self.min_p[slot] = request.min_p

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        wider = len(ids) - self.stop_ids.shape[1]
        if wider > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, wider)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids

    def leave(self, seq: "Sequence") -> None:
        """Give a sequence back what its row has gathered."""
        slot, known = seq.slot, int(self.known[seq.slot])
        first = len(seq.tokens) - len(seq.logprobs)
        seq.tokens = self.tokens[slot, :known].tolist()
        seq.logprobs = self.logprobs[slot, first:known].copy()
        seq.thresholds = self.thresholds[slot, first:known].copy()

    def append(
        self, slot: np.ndarray, token: np.ndarray, logprob: np.ndarray, threshold: np.ndarray
    ) -> None:
        """Add a sampled token to each of the rows `slot`."""
        at = self.known[slot]
        self.tokens[slot, at] = token
        self.logprobs[slot, at] = logprob
        self.thresholds[slot, at] = threshold
        self.known[slot] = at + 1
