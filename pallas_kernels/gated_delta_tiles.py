"""What the gated delta kernels share: products, and arithmetic that must agree to the bit.

Prefill holds 64 rows of a chunk in a tile, decode one row; both evaluate these functions, or the
same expressions on vectors, so a row's bits do not depend on which of them holds it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)
COLUMN = TILE.reduce(0)
# Rows of T that are solved side by side, and terms that one step of their recurrence adds.
GROUP = 4

# Shared memory is synchronised where a kernel says so (`commit_smem`, `wait_smem_to_gmem`), not
# around every store. Sums run along a row, within a warp: they need no shared memory.
PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


def operand(*shape: int, tile: int = 64, dtype=jnp.bfloat16):
    """Shared memory [..., M, N] that tensor cores read: tiles of 8 rows and at most `tile` columns,
    swizzled. The operands of a product have tiles of one width."""
    width = min(shape[-1], tile)
    tiling = plgpu.TilingTransform((8, width))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(2 * width)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def part(i) -> slice:
    """The i-th 64 columns, or rows, of a wider tile."""
    return slice(64 * i, 64 * (i + 1))


def turned(ref):
    return ref.transpose((1, 0))


def plain(ref, layout=TILE) -> jax.Array:
    """What a reference holds that is not laid out for tensor cores."""
    return plgpu.load(ref, layout=layout, optimized=False)


def walk_sizes(columns: int) -> tuple[int, int]:
    """(columns of V that a program of a walk over chunks owns, of `columns` in all; chunks that it
    has in flight): narrow ones where few programs leave multiprocessors idle, since a step takes as
    long as its products are wide."""
    return (32, 3) if columns <= 66 * 64 else (64, 2)


def walk_scratch(block: int, stages: int, width: int) -> list:
    """Where a walk over chunks holds, by stage: q, k, `block` columns of what has a column for each
    of V, G, beta, T and the scores; and the barriers that say so."""
    by_row = plgpu.SMEM((stages, CHUNK), jnp.float32)
    keys = operand(stages, CHUNK, width, tile=block)
    square = operand(stages, CHUNK, CHUNK, tile=block)
    values = operand(stages, CHUNK, block, tile=block)
    barriers = plgpu.Barrier(num_arrivals=7, num_barriers=stages)
    return [keys, keys, values, by_row, by_row, square, square, barriers]


def walk_fetch(sources, targets, barriers, piece, key_head, head, columns, stage) -> None:
    """Start the copies of a chunk; sources [pieces, heads, C, ...] and targets as in
    `walk_scratch`."""
    q, k, values, *rest = (source.at[piece] for source in sources)
    here = [q.at[key_head], k.at[key_head], values.at[head, :, columns]]
    here += [source.at[head] for source in rest]
    for source, target in zip(here, targets, strict=True):
        plgpu.copy_gmem_to_smem(source, target.at[stage], barriers.at[stage])


def product(*pairs) -> jax.Array:
    """Sum over `pairs` of a [M, K] times b [K, N], references to shared memory -> float32 [M, N].

    K is summed in order, one pair after the other.
    """
    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])

    def scope(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))


def two_products(first, second, use) -> tuple[jax.Array, jax.Array]:
    """(use(first product), second product), each given as a pair; `use` overlaps the second."""

    def scope(one, two):
        plgpu.wgmma(one, *first)
        plgpu.wgmma(two, *second)
        used = use(plgpu.wgmma_accumulator_load(one, wait_n=1))
        return used, two[...]

    shapes = [(a.shape[0], b.shape[1]) for a, b in (first, second)]
    return pl.run_scoped(scope, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def pick(x: jax.Array, column: int) -> jax.Array:
    """Column `column` of x [M, 8], in row layout, to the bit."""
    return jnp.max(jnp.where(index(x.shape, 1) == column, x, -jnp.inf), axis=1)


def rows(x: jax.Array, width: int) -> jax.Array:
    """A value per row [M] along `width` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def columns(x: jax.Array, height: int) -> jax.Array:
    """A value per column [N] along `height` rows."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), (1,))


def index(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=TILE)


def decayed(G_row: jax.Array, G_column: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """exp(G_i - G_j) [C, C] for j <= i, 1 elsewhere; row, column: i and j."""
    gap = rows(G_row, CHUNK) - columns(G_column, CHUNK)
    return jnp.exp(jnp.where(row >= column, gap, 0.0))


def unit(parts: list, epsilon: float, scale: float) -> tuple[list[jax.Array], jax.Array]:
    """Rows [M, K], given as tiles of columns in float32, at length `scale`, and the factors [M]
    that make them unit."""
    squares = [jnp.sum(lax.optimization_barrier(part * part), axis=1) for part in parts]
    total = squares[0]
    for more in squares[1:]:
        total = total + more
    factor = lax.rsqrt(total + epsilon)
    return [part * rows(factor, part.shape[1]) * scale for part in parts], factor


def running_sums(given: list, at, held: list) -> list[jax.Array]:
    """G [C] in row layout of several heads: held[c] before row `at`, from there on the sum so far
    plus given[c].

    given, held: references [C] float32 to shared memory.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROW)

    def add(c, carry):
        totals, sums = carry
        totals = [
            jnp.where(c < at, old[c], total + new[c])
            for total, new, old in zip(totals, given, held, strict=True)
        ]
        return totals, [jnp.where(row == c, t, s) for t, s in zip(totals, sums, strict=True)]

    zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROW)
    start = ([jnp.float32(0)] * len(given), [zero] * len(given))
    return lax.fori_loop(0, CHUNK, add, start)[1]


def _lanes() -> tuple[jax.Array, jax.Array]:
    """For 128 lanes that hold a row of T of two heads: the column, and whether of the first."""
    layout = plgpu.Layout.WG_STRIDED((2 * CHUNK,), 1)
    lane = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (2 * CHUNK,), 0), layout)
    first = lane < CHUNK
    return jnp.where(first, lane, lane - CHUNK), first


def _term(total, first, lower, known_row):
    """total + (-L_ij) T_j, the one step of T's recurrence. lower: -L_ij of each head."""
    factor = lower[0] if len(lower) == 1 else jnp.where(first, lower[0], lower[1])
    return total + factor * known_row


def solve(tile, at, heads: int) -> None:
    """Turn `tile` [C, 128] float32, in shared memory, from -L into T, two heads side by side.

    T_i = e_i + sum_{j<i} (-L_ij) T_j, j in order, rounded to bfloat16 row by row. Rows before `at`
    hold T already.
    """
    column, first = _lanes()

    def group(r, _):
        i = [GROUP * r + u for u in range(GROUP)]
        lower = lambda u, j: [tile[i[u], e * CHUNK + j] for e in range(heads)]  # noqa: E731

        def step(block, totals):
            for w in range(GROUP):
                j = GROUP * block + w
                row = tile[j]
                totals = [_term(t, first, lower(u, j), row) for u, t in enumerate(totals)]
            return totals

        totals = [jnp.where(column == row, 1.0, 0.0) for row in i]
        totals = lax.fori_loop(0, r, step, totals)
        solved = []
        for u in range(GROUP):
            total = totals[u]
            for w in range(u):
                total = _term(total, first, lower(u, i[w]), solved[w])
            total = total.astype(jnp.bfloat16).astype(jnp.float32)
            solved.append(jnp.where(i[u] < at, tile[i[u]], total))
        plgpu.commit_smem()  # every warp has read these rows of L
        for row, values in zip(i, solved, strict=True):
            tile[row] = values

    lax.fori_loop(lax.div(at, jnp.int32(GROUP)), CHUNK // GROUP, group, None)


def solve_row(i, lower, known, heads: int) -> jax.Array:
    """Row i of T, float32 [128], as in `solve`. lower [heads, C]: -L_ij; known [C, 128]: earlier
    rows of T."""
    column, first = _lanes()
    done = lax.div(i, jnp.int32(GROUP))

    def term(j, total):
        return _term(total, first, [lower[e, j] for e in range(heads)], known[j])

    def step(block, total):
        for w in range(GROUP):
            total = term(GROUP * block + w, total)
        return total

    total = lax.fori_loop(0, done, step, jnp.where(column == i, 1.0, 0.0))
    for w in range(GROUP - 1):
        j = GROUP * done + w
        total = jnp.where(j < i, term(j, total), total)
    return total
