"""What several tests share: bit comparison, batches, a policy without rounding."""

import jax
import numpy as np

from isojax.batch import Bucket, RaggedBatch, Segment, build
from isojax.mesh import Layout
from isojax.numerics.policy import Policy

EXACT = Policy(compute_dtype="float32")
ONE = Layout()


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The bit pattern of a float array as integers of its width."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(got, want) -> None:
    """Trees of arrays are equal as bit patterns."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.dtype == w.dtype and g.shape == w.shape
        wrong = bits(g) != bits(w)
        assert not wrong.any(), (
            f"{wrong.sum()} of {wrong.size} differ, first {np.argwhere(wrong)[0]}"
        )


def whole_sequences(
    lengths: list[int], tokens: int | None = None, seed: int = 0, vocab: int = 32, chunk: int = 64
) -> RaggedBatch:
    """A training batch of whole sequences of these lengths, pages and slots in order."""
    random = np.random.default_rng(seed)
    segments, page = [], 0
    for slot, length in enumerate(lengths):
        count = -(-length // chunk)
        ids = random.integers(0, vocab, length)
        segments.append(Segment(ids.tolist(), 0, range(page, page + count), slot))
        page += count
    total = tokens or sum(lengths)
    bucket = Bucket(total, len(lengths), page, max(-(-n // chunk) for n in lengths), chunk)
    return build(segments, bucket, chunk, whole=True)
