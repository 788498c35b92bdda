"""Tile choices of the matrix kernels. They are deployment: no entry changes a bit of a result."""

import dataclasses

from pallas_kernels import tuning_table as table


@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """One tile of a product, in the roles of `wgmma`: rows by columns, swapped or not.

    Attributes:
      rows: rows of one consumer warpgroup, a multiple of 64.
      cols: columns, shared by the warpgroups; a multiple of 8 up to 256, and, where the contraction
        is not the operand's last axis, of 64, or 16 or 32 (`matmul_few_rows`).
      warpgroups: consumer warpgroups, stacked along the rows.
      turns: consumer warpgroups take whole tiles by turns instead: one multiplies while the other
        writes its tile out.
      stages: stages of the ring in shared memory.
      swap: rows are the output's columns (N) and columns its rows (M).
      minor: the tile axis that neighbouring blocks differ in (0 rows, 1 columns).
      band: how many tiles of that axis are walked before the other axis moves.
      slots: parts of a warpgroup's tile that may be on their way out of shared memory at a time.
      split: blocks of a cluster that share a tile's leaves (`matmul_few_rows`), a power of two; no
        more than there are leaves take part.
    """

    rows: int
    cols: int
    warpgroups: int = 2
    turns: bool = False
    stages: int = 4
    swap: bool = False
    minor: int = 1
    band: int = 8
    slots: int = 2
    split: int = 1

    @property
    def height(self) -> int:
        """Rows of what the warpgroups work on together."""
        return self.rows * (1 if self.turns else self.warpgroups)

    @property
    def readers(self) -> int:
        """Warpgroups that read a stage of the ring."""
        return 1 if self.turns else self.warpgroups


SHARED_MEMORY = 226 * 1024  # bytes that a block's ring, waiting sums and outgoing tiles may take


def _choose(rows: list[table.Row], **sizes: int) -> dict:
    for bounds, tile in rows:
        if all(sizes[name] <= bound for name, bound in bounds.items()):
            return tile
    raise ValueError(f"no tile for {sizes}")


def matmul_tile(m: int, n: int, k: int, leaves: int) -> MatmulTile:
    """The tile for an [m, k] by [k, n] product in `leaves` leaves."""
    return _filled(_choose(table.MATMUL, m=m, n=n, k=k, leaves=leaves), m)


def matmul_columns_tile(m: int, n: int) -> MatmulTile:
    """The tile of `matmul_columns`: [m, K] by weights of n columns in all."""
    return _filled(_choose(table.MATMUL_COLUMNS, m=m, n=n), m)


def _filled(choice: dict, m: int) -> MatmulTile:
    """The tile of a choice; one without columns gets as many as there are rows, swapped."""
    if "cols" in choice:
        return MatmulTile(**choice)
    cols = max(8, m + -m % 8)
    outgoing = (1 + choice.get("split", 1)) * cols * 64 * 4  # and what a cluster's blocks send
    fitting = (SHARED_MEMORY - outgoing) // ((choice["rows"] + cols) * 128)
    return MatmulTile(**{**choice, "cols": cols, "stages": min(choice["stages"], fitting)})


def grouped_matmul_tile(rows: int, groups: int, k: int) -> MatmulTile:
    """The tile of `grouped_matmul`: `rows` rows in `groups` groups, products over `k`."""
    return MatmulTile(**_choose(table.GROUPED_MATMUL, rows_per_group=rows // groups, k=k))


def grouped_swiglu_tile(rows: int, groups: int, keep: bool) -> MatmulTile:
    """The tile of `grouped_swiglu`, of one of its two products; `keep`: they are results too."""
    sizes = {"rows_per_group": rows // groups, "keep": int(keep)}
    return MatmulTile(**_choose(table.GROUPED_SWIGLU, **sizes))


def grouped_swiglu_backward_tile(rows: int, groups: int) -> MatmulTile:
    """The tile of `grouped_swiglu_backward`: the forward's, in which the products were kept. Its
    three results want more room on their way out."""
    return dataclasses.replace(grouped_swiglu_tile(rows, groups, keep=True), slots=4)


def grouped_dw_tile() -> MatmulTile:
    """The tile of `grouped_matmul_dw`."""
    return MatmulTile(**_choose(table.GROUPED_DW))


def logprob_tile() -> MatmulTile:
    """The tile of `linear_logprob`."""
    return MatmulTile(**_choose(table.LINEAR_LOGPROB))


def logit_gradient_tile() -> MatmulTile:
    """The tile of `logit_gradient`."""
    return MatmulTile(**_choose(table.LOGIT_GRADIENT))
