"""Tile choices of the matrix kernels, by shape. They are deployment: no entry changes a bit.

`matmul_tiles.json` beside this file is the table that `experiments/bench_kernels.py` writes on a
device; a shape that it does not hold falls back to the rules below.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """One tile of `matmul`, in the roles of `wgmma`: rows by columns, swapped or not.

    Attributes:
      rows: rows of one consumer warpgroup, a multiple of 64.
      cols: columns, shared by the warpgroups; a multiple of 8 up to 256.
      warpgroups: consumer warpgroups, stacked along the rows.
      stages: stages of the ring in shared memory.
      swap: rows are the output's columns (N) and columns its rows (M).
      minor: the tile axis that neighbouring blocks differ in (0 rows, 1 columns).
      band: how many tiles of that axis are walked before the other axis moves.
      slots: parts of a warpgroup's tile that may be on their way out of shared memory at a time.
      smem_holds: sums of leaves that wait in shared memory (`matmul_core.Holds`); greater ones
        wait in device memory.
      leaf_groups: warpgroups that share a tile's leaves, a subtree each, instead of its rows.
    """

    rows: int
    cols: int
    warpgroups: int = 2
    stages: int = 4
    swap: bool = False
    minor: int = 1
    band: int = 8
    slots: int = 2
    smem_holds: int = 0
    leaf_groups: int = 1


def matmul_tile(m: int, k: int, n: int, leaves: int) -> MatmulTile:
    """The tile for an [m, k] by [k, n] product in `leaves` leaves."""
    del k
    if m <= 64:
        cols = max(8, m + -m % 8)
        return MatmulTile(rows=64, cols=cols, warpgroups=1, stages=12, swap=True)
    if m <= 512 and n <= 8192 or n <= 64:
        return MatmulTile(rows=64, cols=128, warpgroups=1, stages=8)
    if leaves > 1:
        return MatmulTile(rows=64, cols=128, stages=6)
    return MatmulTile(rows=64, cols=256, minor=0, band=16)


def grouped_matmul_tile(rows: int, groups: int, k: int, n: int) -> MatmulTile:
    """The tile of `grouped_matmul`: swapped when groups hold a few rows each."""
    del k, n
    if rows <= 32 * groups:
        return MatmulTile(rows=64, cols=32, stages=6, swap=True)
    return MatmulTile(rows=64, cols=256)


def grouped_swiglu_tile(rows: int, groups: int, k: int, n: int) -> MatmulTile:
    """The tile of `grouped_swiglu`, of one of its two products."""
    del k, n
    if rows <= 32 * groups:
        return MatmulTile(rows=64, cols=32, stages=5, swap=True)
    return MatmulTile(rows=64, cols=128, swap=True)


def grouped_dw_tile(leaves: int) -> MatmulTile:
    """The tile of `grouped_matmul_dw`."""
    return MatmulTile(rows=64, cols=128, slots=2 if leaves > 4 else 4)


def logprob_tile() -> MatmulTile:
    """The tile of `linear_logprob` and of its logit gradient."""
    return MatmulTile(rows=64, cols=256, minor=0, band=16)
