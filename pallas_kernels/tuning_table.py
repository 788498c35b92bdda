"""Tiles that `experiments/bench_kernels.py --full` found best, by op and shape class.

Measured on one NVIDIA H200, 2026-11-29 and 30. A row is (what the shape must satisfy, tile); the
first row whose conditions all hold is taken. Conditions are upper bounds on sizes of the call.
"""

Row = tuple[dict[str, int], dict[str, int | bool]]

MATMUL: list[Row] = [
    # Few rows: tokens lie in the 8-wide side (cols is filled in from m), weights stream by.
    ({"m": 64, "leaves": 1}, dict(rows=64, warpgroups=1, stages=16, swap=True)),
    ({"m": 64, "n": 1024}, dict(rows=64, warpgroups=1, stages=16, swap=True)),
    ({"m": 64, "n": 8192}, dict(rows=64, warpgroups=1, stages=16, swap=True, split=2)),
    ({"m": 64}, dict(rows=64, warpgroups=1, stages=16, swap=True)),
    ({"m": 512, "n": 1024}, dict(rows=64, cols=64, warpgroups=1, stages=12)),
    ({"m": 512, "n": 8192, "leaves": 1}, dict(rows=64, cols=128, warpgroups=1, stages=8)),
    ({"m": 256, "n": 16384, "leaves": 1}, dict(rows=64, cols=192, stages=5, slots=1)),
    ({"m": 512, "n": 8192}, dict(rows=64, cols=64, warpgroups=1, stages=12)),
    ({"n": 64}, dict(rows=64, cols=64, stages=6)),
    # A short contraction hides no epilogue, and 192 columns fill the last round of blocks.
    ({"leaves": 1, "n": 8192}, dict(rows=64, cols=256, minor=0)),
    ({"leaves": 1, "k": 2048}, dict(rows=128, cols=192, stages=5, slots=1, turns=True, minor=0)),
    ({"leaves": 1}, dict(rows=64, cols=256, minor=0)),
    ({"leaves": 8}, dict(rows=64, cols=128, stages=5)),
    # More sums wait, up to those of 64 leaves. Chosen for that, not measured.
    ({}, dict(rows=64, cols=64, stages=8)),
]

MATMUL_COLUMNS: list[Row] = [
    # Narrow weights alone: narrow tiles, for enough blocks.
    ({"m": 64, "n": 1536}, dict(rows=64, cols=32, warpgroups=1, stages=12)),
    # Two blocks fit a multiprocessor, so that all run at once.
    ({"m": 16}, dict(rows=64, warpgroups=1, stages=10, swap=True)),
    ({"m": 64}, dict(rows=64, warpgroups=1, stages=6, swap=True)),
    ({"m": 128}, dict(rows=64, warpgroups=1, stages=4, swap=True)),
    ({"n": 1536}, dict(rows=64, cols=64, warpgroups=1, stages=12, swap=True)),
    ({}, dict(rows=64, cols=256, stages=4, swap=True)),
]

GROUPED_MATMUL: list[Row] = [
    # At most 32 rows a group on average: a group's rows fit the 8-wide side.
    ({"rows_per_group": 32}, dict(rows=64, cols=32, stages=6, swap=True)),
    # 192 rows a tile, as in the product before it, whose table of rows it shares.
    ({"k": 512}, dict(rows=128, cols=192, stages=5, slots=1, swap=True, turns=True)),
    ({}, dict(rows=64, cols=256)),
]

GROUPED_SWIGLU: list[Row] = [
    ({"rows_per_group": 32}, dict(rows=64, cols=32, stages=5, swap=True)),
    ({"keep": 0}, dict(rows=64, cols=192, stages=4, slots=1, swap=True, turns=True)),
    ({}, dict(rows=64, cols=128, stages=6, swap=True, turns=True)),
]

GROUPED_DW: list[Row] = [({}, dict(rows=128, cols=128, stages=6, turns=True))]

LINEAR_LOGPROB: list[Row] = [({}, dict(rows=64, cols=256, minor=0, band=20))]

LOGIT_GRADIENT: list[Row] = [
    ({}, dict(rows=128, cols=128, stages=6, turns=True, minor=0, band=20)),
]
