"""Attention kernels: values against a float32 formula, lowering at full size, and equality of bits
on a GPU.

On a CPU the kernels run in the interpreter of Mosaic GPU. It multiplies by other means than a
tensor core, so it shows that rows, masks, pages and gradients are right, not that bits agree; `gpu`
tests show that.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isojax  # noqa: F401  (sets XLA flags)
from pallas_kernels import (
    attention,
    attention_backward,
    attention_backward_keys,
    attention_prefill,
)
from tests.kernels import interpreted

gpu = pytest.mark.gpu


def formula(q, k, v, scale):
    """(out, log-sum-exp) of q [n, Hq, D], the last n of m tokens with k, v [m, Hkv, D]; float32."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    s = jnp.einsum("nhd,mhd->hnm", q, k, precision="highest") * scale
    s = jnp.where(jnp.arange(m) <= jnp.arange(n)[:, None] + m - n, s, -jnp.inf)
    out = jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(s, -1), v, precision="highest")
    return out, jax.nn.logsumexp(s, -1).T


def draw(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def wide(x):
    return np.asarray(x, np.float32)


@dataclasses.dataclass(frozen=True)
class Heads:
    query: int
    key: int
    dim: int

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclasses.dataclass
class World:
    """Sequences with all their keys and values, and the pages that hold them at some moment."""

    heads: Heads
    keys: list
    values: list

    @classmethod
    def create(cls, rng, heads, lengths):
        make = lambda: [wide(draw(rng, n, heads.key, heads.dim)) for n in lengths]  # noqa: E731
        return cls(heads, make(), make())

    def pages(self, rng, known, columns, page):
        """Pages at random places with `known[s]` tokens of sequence s, NaN everywhere else."""
        count = len(known)
        table = rng.permutation(count * columns + 3)[: count * columns].reshape(count, columns)
        shape = (count * columns + 3, page, self.heads.key, self.heads.dim)
        pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        for pool, source in zip(pools, (self.keys, self.values), strict=True):
            for s, n in enumerate(known):
                for j in range(-(-n // page)):
                    part = source[s][j * page : min((j + 1) * page, n)]
                    pool[table[s, j], : len(part)] = part
        return (*(jnp.asarray(x, jnp.bfloat16) for x in pools), jnp.asarray(table, jnp.int32))


def attend(
    world, rng, tokens, entries, *, decode, page=64, columns=8, block=64, segment=4096, lse=False
):
    """Interpret one batch; entries are (start, length, context) of sequences 0, 1, ..."""
    heads = world.heads
    start, length, context = (jnp.asarray(x, jnp.int32) for x in np.asarray(entries).T)
    q = draw(rng, tokens, heads.query, heads.dim)
    k_pages, v_pages, table = world.pages(rng, [n + c for _, n, c in entries], columns, page)
    blocking = attention.blocking_of(heads.query, heads.key, block, segment)
    work = attention.plan_attention(
        start, length, context, tokens=tokens, max_keys=columns * page, decode=decode,
    blocking=blocking
    )  # fmt: skip
    with interpreted():
        out, sums = attention.paged_attention(
            q, k_pages, v_pages, table, start, work, scale=heads.scale, blocking=blocking,
            tiles=any(n != 1 for _, n, _ in entries) or not decode, decode=decode, lse=lse,
        )  # fmt: skip
    return q, out, sums


def check_rows(world, entries, q, out, sums=None):
    out, used = wide(out), np.zeros(out.shape[0], bool)
    for s, (start, n, context) in enumerate(entries):
        if not n:
            continue
        rows, total = slice(start, start + n), n + context
        used[rows] = True
        expected, expected_sums = formula(
            wide(q)[rows], world.keys[s][:total], world.values[s][:total], world.heads.scale
        )
        np.testing.assert_allclose(out[rows], expected, atol=0.03, rtol=0.02)
        if sums is not None:
            np.testing.assert_allclose(np.asarray(sums)[rows], expected_sums, atol=1e-3, rtol=1e-3)
    assert not out[~used].any()  # padding rows are zero, and nothing is NaN


@pytest.mark.parametrize(
    ("heads", "entries", "options"),
    [
        # rows that share tiles, unaligned starts, a prompt's piece after 100 tokens, padding
        (Heads(2, 1, 64), [(1, 69, 0), (75, 20, 100), (95, 1, 3), (0, 0, 0)], {}),
        # states of several KV segments kept and folded
        (Heads(2, 1, 64), [(3, 40, 150)], {"segment": 64}),
        # one query head a KV head, KV blocks of two pages
        (Heads(2, 2, 64), [(3, 66, 0), (70, 30, 90)], {"block": 128, "segment": 128}),
    ],
)
def test_tiles(heads, entries, options, monkeypatch):
    monkeypatch.setattr(attention_prefill, "MULTIPROCESSORS", 2)  # several items a thread block
    rng = np.random.default_rng(0)
    world = World.create(rng, heads, [n + c for _, n, c in entries])
    q, out, sums = attend(world, rng, 104, entries, decode=False, lse=True, **options)
    check_rows(world, entries, q, out, sums)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (Heads(8, 1, 64), {}),
        (
            Heads(4, 2, 64),
            {"segment": 128},
        ),  # groups smaller than a shared-memory tile, several segments
        (Heads(6, 2, 64), {"block": 128, "segment": 128}),  # groups that straddle such tiles
    ],
)
def test_decode(heads, options):
    rng = np.random.default_rng(1)
    entries = [(4, 1, 300), (0, 0, 5), (1, 1, 63), (2, 1, 64), (0, 1, 0)]
    world = World.create(rng, heads, [n + c for _, n, c in entries])
    q, out, _ = attend(world, rng, 7, entries, decode=True, **options)
    check_rows(world, entries, q, out)


def test_mixed():
    rng = np.random.default_rng(2)
    entries = [(0, 1, 70), (1, 20, 50), (30, 1, 0)]
    world = World.create(rng, Heads(2, 1, 64), [n + c for _, n, c in entries])
    q, out, _ = attend(world, rng, 40, entries, decode=True)
    check_rows(world, entries, q, out)


@pytest.mark.parametrize("piece_rows", [1, 48, 64])
def test_write_pages(piece_rows):
    rng = np.random.default_rng(3)
    heads, width, tokens = 1, 64, 80
    k, v = draw(rng, tokens, heads, width), draw(rng, tokens, heads, width)
    pools = [draw(rng, 6, 64, heads, width) for _ in range(2)]
    table = np.asarray([[3, 1], [5, 0]])
    # sequence, row, first position, length
    pieces = np.asarray(
        [(0, 0, 16, 48), (0, 48, 64, 6), (1, 60, 60, 4), (1, 64, 64, 1), (0, 0, 0, 0)]
    )
    pieces[:, 3] = np.minimum(pieces[:, 3], piece_rows)
    columns = [jnp.asarray(c, jnp.int32) for c in pieces.T]
    write = jax.jit(lambda *args: attention.write_pages(*args, piece_rows=piece_rows))
    with interpreted():
        results = write(k, v, *pools, jnp.asarray(table, jnp.int32), *columns)
    for pool, x, result in zip(pools, (k, v), results, strict=True):
        expected = wide(pool).copy()
        for s, row, first, n in pieces:
            for i in range(n):
                expected[table[s, (first + i) // 64], (first + i) % 64] = wide(x)[row + i]
        np.testing.assert_array_equal(wide(result), expected)


@pytest.mark.parametrize(
    ("heads", "entries", "tokens", "chain"),
    [
        (Heads(4, 1, 64), [(0, 70), (72, 100), (0, 0)], 176, 2),
        (Heads(3, 1, 64), [(5, 65), (71, 20)], 91, 1),
        # three tiles of keys by twos, two parts of columns, rows that are no multiple of 8
        (Heads(2, 1, 128), [(3, 150)], 155, 1),
        # a wide head: its sums are in two warpgroups
        (Heads(1, 1, 192), [(1, 70)], 77, 1),
    ],
)
def test_backward(heads, entries, tokens, chain, monkeypatch):
    for module in (attention_backward, attention_backward_keys):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 2)  # several items a thread block
    rng = np.random.default_rng(4)
    q, dout = (draw(rng, tokens, heads.query, heads.dim) for _ in range(2))
    k, v = (draw(rng, tokens, heads.key, heads.dim) for _ in range(2))
    out, lse = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:2], np.nan, np.float32)
    expected = [np.zeros(x.shape, np.float32) for x in (q, k, v)]
    used = np.zeros(tokens, bool)
    for start, n in entries:
        rows = slice(start, start + n)
        used[rows] = True
        (o, s), vjp = jax.vjp(
            lambda *a: formula(*a, heads.scale), *(jnp.asarray(wide(x)[rows]) for x in (q, k, v))
        )
        out[rows], lse[rows] = o, s
        for total, part in zip(expected, vjp((wide(dout)[rows], jnp.zeros_like(s))), strict=True):
            total[rows] = part
    spoil = lambda x: jnp.where(used[:, None, None], x, jnp.nan).astype(jnp.bfloat16)  # noqa: E731
    start, length = (jnp.asarray(x, jnp.int32) for x in np.asarray(entries).T)
    work = attention.plan_attention_backward(start, length, tokens=tokens)
    with interpreted():
        gradients = attention.paged_attention_backward(
            *map(spoil, (q, k, v, out)), jnp.asarray(lse), spoil(dout), work, scale=heads.scale,
            max_length=tokens, chain=chain,
        )  # fmt: skip
    for result, total in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(wide(result), total, atol=0.03, rtol=0.03)
        assert not wide(result)[~used].any()


LARGE = [Heads(16, 2, 256), Heads(32, 8, 128), Heads(2, 1, 256)]


def lower(function, *shapes):
    jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


def arrays(heads, tokens, sequences, columns):
    """Shapes of q, k, pages, table, one integer a sequence."""
    shape = jax.ShapeDtypeStruct
    return (
        shape((tokens, heads.query, heads.dim), jnp.bfloat16),
        shape((tokens, heads.key, heads.dim), jnp.bfloat16),
        shape((512, 64, heads.key, heads.dim), jnp.bfloat16),
        shape((sequences, columns), jnp.int32),
        shape((sequences,), jnp.int32),
    )


@pytest.mark.parametrize("heads", LARGE)
def test_forward_lowers(heads):
    q, k, pages, table, ints = arrays(heads, 8192, 64, 256)
    blocking = attention.blocking_of(heads.query, heads.key)

    def run(q, k, pages, table, start, length, context, *pieces):
        k_pages, v_pages = attention.write_pages(k, k, pages, pages, table, *pieces, piece_rows=64)
        work = attention.plan_attention(
            start, length, context, tokens=8192, max_keys=256 * 64, decode=True, blocking=blocking
        )
        return attention.paged_attention(
            q, k_pages, v_pages, table, start, work, scale=heads.scale, blocking=blocking,
            tiles=True, decode=True,
        )  # fmt: skip

    lower(run, q, k, pages, table, *[ints] * 7)


@pytest.mark.parametrize("heads", LARGE)
def test_backward_lowers(heads):
    q, k, _, _, ints = arrays(heads, 8192, 16, 1)
    lse = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)

    def run(q, k, v, out, lse, dout, start, length):
        work = attention.plan_attention_backward(start, length, tokens=8192)
        return attention.paged_attention_backward(
            q, k, v, out, lse, dout, work, scale=heads.scale, max_length=8192, chain=2
        )

    lower(run, q, k, k, q, lse, q, ints, ints)


# --- bits, on a GPU ---


class Exactness:
    """Random batches over fixed sequences: each row must have the bits of one training call."""

    tokens, longest = 512, 512

    def __init__(
        self, heads: Heads, *, segment: int, seed: int = 0, page: int = 64, block: int = 64
    ):
        rng = np.random.default_rng(seed)
        self.heads, self.page, self.columns = heads, page, self.longest // page
        self.lengths = np.asarray([512, 511, 449, 385, 321, 256, 193, 130, 129, 65, 64, 3])
        count, total = len(self.lengths), int(self.lengths.sum())
        shape = (count, self.longest, heads.key, heads.dim)
        q = draw(rng, count, self.longest, heads.query, heads.dim) * 2
        self.data = (q, draw(rng, *shape) * 2, draw(rng, *shape))
        self.blocking = attention.blocking_of(heads.query, heads.key, block, segment)
        start = np.cumsum(self.lengths) - self.lengths
        seq = np.repeat(np.arange(count), self.lengths)
        position = np.arange(total) - start[seq]
        rows = -(-total // 8) * 8
        pad = lambda x, fill: np.concatenate([x, np.full(rows - total, fill)])  # noqa: E731
        run = jax.jit(lambda *a: self._run(*a, tiles=True, decode=False))
        out = run(
            self.data, pad(seq, count), pad(position, 0), start, self.lengths, 0 * start,
            self._table(rng),
        )  # fmt: skip
        self.reference = jnp.zeros(q.shape, q.dtype).at[seq, position].set(out[:total])
        self._count = jax.jit(
            lambda data, reference, cases: jax.lax.map(
                lambda case: self._mismatches(data, reference, *case), cases
            )
        )

    def _table(self, rng):
        pages = len(self.lengths) * self.columns
        return rng.permutation(pages + 5)[:pages].reshape(len(self.lengths), self.columns)

    def _run(self, data, seq, position, start, length, context, table, *, tiles, decode):
        """out [T, Hq, D] of one batch; what is not yet known of a sequence is NaN in its pages."""
        q, *kept = data
        known = (context + length)[:, None] > jnp.arange(self.longest)
        spoilt = [jnp.where(known[..., None, None], x, jnp.nan).astype(x.dtype) for x in kept]
        pools = []
        for x in spoilt:
            pool = jnp.full((table.size + 5, self.page, *x.shape[2:]), jnp.nan, x.dtype)
            pools.append(pool.at[table].set(x.reshape(*table.shape, self.page, *x.shape[2:])))
        q = q.at[seq, position].get(mode="fill", fill_value=jnp.nan)
        tokens = q.shape[0]
        start, length, context, table = (
            jnp.asarray(x, jnp.int32) for x in (start, length, context, table)
        )
        work = attention.plan_attention(
            start, length, context, tokens=tokens, max_keys=self.longest, decode=decode,
            blocking=self.blocking,
        )  # fmt: skip
        out, _ = attention.paged_attention(
            q, *pools, table, start, work, scale=self.heads.scale, blocking=self.blocking,
            tiles=tiles, decode=decode,
        )  # fmt: skip
        return out

    def _mismatches(self, data, reference, *case):
        """Elements that differ from the training call, without and with splitting single tokens."""
        expected = reference.at[case[0], case[1]].get(mode="fill", fill_value=0)
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int16)  # noqa: E731
        outs = [self._run(data, *case, tiles=True, decode=decode) for decode in (False, True)]
        return jnp.stack([jnp.sum(bits(out) != bits(expected)) for out in outs])

    def case(self, rng):
        """A random batch: decoded tokens, pieces, whole sequences, in any order and with gaps."""
        count = len(self.lengths)
        start, length, context = (np.zeros(count, np.int64) for _ in range(3))
        seq, position = np.full(self.tokens, count), np.zeros(self.tokens, np.int64)
        row = 0
        for s in rng.permutation(count)[: rng.integers(1, count + 1)]:
            row += rng.choice([0, 0, 0, 1, 5, 8])
            kind = rng.integers(3)
            n = 1 if kind == 0 else rng.integers(1, self.lengths[s] + 1)
            n = min(n, self.tokens - row)
            if n < 1:
                break
            c = rng.integers(0, self.lengths[s] - n + 1)
            if kind == 2:
                c = 0
            start[s], length[s], context[s] = row, n, c
            seq[row : row + n], position[row : row + n] = s, np.arange(c, c + n)
            row += n
        return seq, position, start, length, context, self._table(rng)

    def mismatches(self, seed: int, cases: int) -> np.ndarray:
        """[cases, 2] counts of elements whose bits differ."""
        rng = np.random.default_rng(seed)
        batch = zip(*[self.case(rng) for _ in range(cases)], strict=True)
        return np.asarray(self._count(self.data, self.reference, tuple(map(np.stack, batch))))


@gpu
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (Heads(16, 2, 256), {"segment": 128}),
        (Heads(16, 2, 256), {"segment": 4096}),
        (Heads(32, 8, 128), {"segment": 128}),
        (Heads(32, 8, 128), {"segment": 256, "block": 128}),
        (Heads(6, 2, 64), {"segment": 192, "page": 128}),
        (Heads(4, 4, 128), {"segment": 128}),
    ],
)
def test_bits(heads, options):
    exactness = Exactness(heads, **options)
    assert np.isfinite(wide(exactness.reference)).all()
    for seed in range(20):
        assert not exactness.mismatches(seed, 100).any()
