"""Rows between ranks: as many rounds as the largest count takes, and nobody else's rows."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from isojax.numerics.collectives import AT_LEAST, send_rows

RANKS, WIDTH = 4, 2
SIZE = 4 * AT_LEAST


def counts_of(case: str) -> np.ndarray:
    """Rows from each rank (first axis) to each; a rank gets at most SIZE."""
    random = np.random.default_rng(0)
    return {
        "none": np.zeros((RANKS, RANKS), np.int32),
        "even": np.full((RANKS, RANKS), SIZE // RANKS, np.int32),
        "one to one": SIZE * np.roll(np.eye(RANKS, dtype=np.int32), 1, axis=1),
        "gaps": np.array([[0, 3, 0, SIZE], [0, 0, 1, 0], [5, 0, 0, 0], [0, 1, 900, 0]], np.int32),
        "random": random.integers(0, SIZE // RANKS, (RANKS, RANKS)).astype(np.int32),
    }[case]


@pytest.mark.parametrize("case", ["none", "even", "one to one", "gaps", "random"])
@pytest.mark.parametrize("size", [SIZE, AT_LEAST])
def test_send_rows(case: str, size: int):
    counts = np.minimum(counts_of(case), size // (1 if case in ("one to one", "none") else RANKS))
    random = np.random.default_rng(1)
    rows = random.standard_normal((RANKS, SIZE, WIDTH)).astype(np.float32)
    rows[:, 1::7] = np.nan
    order = np.stack([random.permutation(SIZE) for _ in range(RANKS)]).astype(np.int32)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ranks",))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("ranks"), out_specs=PartitionSpec("ranks"),
        check_vma=False,
    )  # fmt: skip
    def exchange(rows, order, send, receive):
        most = np.int32(counts.max())
        return send_rows(rows[0], order[0], send[0], receive[0], most, size, ("ranks",))[None]

    came = np.asarray(exchange(rows, order, counts, counts.T.copy()))
    first = np.cumsum(counts, axis=1) - counts
    for rank in range(RANKS):
        sent = [
            rows[s, order[s, first[s, rank] : first[s, rank] + counts[s, rank]]]
            for s in range(RANKS)
        ]
        want = np.concatenate(sent)
        np.testing.assert_array_equal(came[rank, : len(want)].view(np.int32), want.view(np.int32))
