"""The attention kernels behind their op: interpreted, against the reference; lowered at the 35B
shapes.

The interpreter runs float32 arithmetic of its own, in which a row's bits do not depend on where it
stands either: that rows, pages and lists are wired right shows as equal bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from isojax import cache as caches
from isojax.batch import Bucket, Segment, build
from isojax.forward import forward
from isojax.models.config import ModelConfig
from isojax.models.params import parameters
from isojax.numerics.policy import Policy
from isojax.ops.attention import attention, attention_work
from tests.kernels import BF16, I32, error, f64, interpreted, normal, same_bits
from tests.util import ONE, whole_sequences

HEADS, KV_HEADS, WIDTH, PAGE = 2, 1, 64, 64
MOSAIC, REFERENCE = Policy(evaluation="mosaic", kv_segment=64), Policy(kv_segment=64)


@functools.partial(jax.jit, static_argnums=0)
def call(policy, q, k, v, keys, values, layer, batch):
    work = attention_work(batch, keys, heads=q.shape[1], policy=policy, layout=ONE)
    return attention(
        q, k, v, keys, values, layer, batch, work, kv_heads=k.shape[1], policy=policy, layout=ONE
    )


class Sampler:
    """Sequences fed to the op in portions; all memory that no token has written is NaN."""

    def __init__(self, policy, lengths):
        self.policy = policy
        make = lambda i, n, heads: normal(10 * i + heads, n, heads, WIDTH)  # noqa: E731
        self.rows = [
            [make(3 * s + i, n, h) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
            for s, n in enumerate(lengths)
        ]
        self.pools = [jnp.full((2, 7, PAGE, KV_HEADS, WIDTH), jnp.nan, BF16) for _ in range(2)]
        self.pages = [[5, 1, 3], [0, 6, 2]]
        self.out = [np.full((n, HEADS, WIDTH), np.nan, BF16) for n in lengths]

    def feed(self, portions, bucket):
        """portions: (sequence, first, end, row)."""
        segments = [Segment([0] * (e - f), f, self.pages[s], s, at) for s, f, e, at in portions]
        batch = jax.tree.map(jnp.asarray, build(segments, bucket, PAGE))
        rows = []
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
            x = jnp.full((bucket.tokens, heads, WIDTH), jnp.nan, BF16)
            for s, f, e, at in portions:
                x = x.at[at : at + e - f].set(self.rows[s][i][f:e])
            rows.append(x)
        with interpreted():
            out, *self.pools = call(self.policy, *rows, *self.pools, jnp.int32(1), batch)
        out, used = np.asarray(out), np.zeros(bucket.tokens, bool)
        for s, f, e, at in portions:
            self.out[s][f:e], used[at : at + e - f] = out[at : at + e - f], True
        assert not out[~used].view(np.int16).any()


PIECES = Bucket(tokens=136, sequences=3, pieces=5, pages=3, piece_rows=PAGE)
SINGLE = Bucket(tokens=5, sequences=3, pieces=3, pages=3, piece_rows=1)


def test_pieces_and_decode_agree_with_one_call_and_with_the_reference():
    lengths = (129, 70)
    runs = []
    for policy in (MOSAIC, REFERENCE):
        run = Sampler(policy, lengths)
        # pieces at odd rows, single tokens across the ends of page, block and segment, both at once
        run.feed([(0, 0, 62, 3), (1, 0, 50, 66)], PIECES)
        run.feed([(0, 62, 63, 0), (1, 50, 51, 4)], SINGLE)
        run.feed([(0, 63, 64, 2)], SINGLE)
        run.feed([(0, 64, 65, 7), (1, 51, 70, 9)], PIECES)
        run.feed([(0, 65, 128, 13)], PIECES)
        run.feed([(0, 128, 129, 1)], SINGLE)
        runs.append(run)
    mine, want = runs
    whole = Sampler(MOSAIC, lengths)
    for s, n in enumerate(lengths):
        whole.feed([(s, 0, n, 1)], PIECES)
        assert same_bits(mine.out[s], whole.out[s])
        assert error(mine.out[s], f64(want.out[s])) < 5e-3
    for x, y in zip(mine.pools, want.pools, strict=True):
        assert same_bits(x, y)


def test_gradient_agrees_with_the_reference():
    lengths, tokens = (69, 20, 130), 224
    batch = jax.tree.map(jnp.asarray, whole_sequences(list(lengths), tokens))
    used = np.asarray(batch.seq) < 3
    arrays = [normal(i, tokens, h, WIDTH) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    arrays = [jnp.where(used[:, None, None], x, jnp.nan) for x in arrays]
    weight = normal(9, tokens, HEADS, WIDTH)
    pool = jnp.full((1, 7, PAGE, KV_HEADS, WIDTH), jnp.nan, BF16)
    results = []
    for policy in (MOSAIC, REFERENCE):

        def out(q, k, v, policy=policy):
            return call(policy, q, k, v, pool, pool, jnp.int32(0), batch)[0]

        with interpreted():
            value, pull = jax.vjp(out, *arrays)
            results.append((value, *pull(weight)))
    for mine, want in zip(*results, strict=True):
        assert mine.dtype == want.dtype and not np.asarray(mine)[~used].any()
        assert error(mine, f64(want)) < 1e-2


def test_a_decode_call_takes_single_tokens():
    with pytest.raises(ValueError, match="one token, not 2"):
        build([Segment([0, 0], 0, [1], 0)], SINGLE, PAGE)


def test_only_whole_sequences_are_differentiated():
    batch = build([Segment([0] * 70, 0, [0, 1], 0)], PIECES, PAGE)
    pool = jnp.zeros((1, 2, PAGE, 1, WIDTH), BF16)
    x = jnp.zeros((136, 1, WIDTH), BF16)
    with pytest.raises(ValueError, match="whole=True"):
        jax.vjp(lambda q: call(MOSAIC, q, x, x, pool, pool, 0, batch)[0], x)
    with pytest.raises(ValueError, match="no cached tokens"):
        build([Segment([0], 70, [0, 1], 0)], PIECES, PAGE, whole=True)


@pytest.mark.parametrize(
    ("width", "page", "options", "advice"),
    [
        (96, 64, {}, "64, 128, 192 or 256"),
        (64, 64, {"compute_dtype": "float32"}, "compute_dtype"),
        (64, 64, {"kv_block": 32}, "kv_block"),
        (256, 64, {"kv_block": 256}, "shared memory"),
        (64, 512, {"kv_block": 512}, "keys in a block"),
        (64, 96, {}, "page of 96"),
        (64, 512, {}, "page of 512"),
        (256, 256, {}, "page of 256"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(width, page, options, advice):
    pool = jax.ShapeDtypeStruct((1, 2, page, 1, width), BF16)
    policy = Policy(evaluation="mosaic", **options)
    with pytest.raises(ValueError, match=advice) as caught:
        attention_work(build([], PIECES, PAGE), pool, heads=2, policy=policy, layout=ONE)
    assert 'evaluation = "reference"' in str(caught.value)


# prefill or decode with the fold of its segments beside the page write; training with its gradient
KERNELS = {"decode": 3, "pieces": 4, "whole": 2, "gradient": 5}


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("heads", [(16, 2), (2, 1)])
@pytest.mark.parametrize("case", KERNELS)
def test_lowers_at_model_shapes(case, heads):
    rows = 1 if case == "decode" else PAGE
    tokens, pages = (16, 64) if rows == 1 else (1024, 64)
    bucket = Bucket(tokens, 16, 32, pages + 1, rows)
    batch = build([], bucket, PAGE, whole=case in ("whole", "gradient"))
    shape = jax.ShapeDtypeStruct
    policy = Policy(evaluation="mosaic")
    q, k = (shape((tokens, n, 256), BF16) for n in heads)
    pool = shape((3, 100, PAGE, heads[1], 256), BF16)

    def op(q, k, v, *rest):
        return call(policy, q, k, v, *rest)

    def gradient(q, k, v, dout, *rest):
        return jax.vjp(lambda *x: op(*x, *rest)[0], q, k, v)[1](dout)

    rest = (pool, pool, shape((), I32), batch)
    if case == "gradient":
        text = lowered(gradient, q, k, k, q, *rest)
    else:
        text = lowered(op, q, k, k, *rest)
        # both pools are written where they lie
        assert text.count("output_operand_alias<") == 2
    assert text.count("custom_call @mosaic_gpu") == KERNELS[case]


MODEL = ModelConfig(
    model_type="qwen3", num_layers=3, vocab_size=512, hidden_size=256, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, rotary_dim=64, intermediate_size=256,
)  # fmt: skip


def primitives(jaxpr, depth=0):
    """(name, number of loops around it) of every equation."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, depth
        for inner in jaxprs_in_params(eqn.params):
            yield from primitives(inner, depth + (eqn.primitive.name == "scan"))


@pytest.mark.parametrize("whole", [False, True])
def test_all_layers_share_the_work_lists(whole):
    policy = Policy(evaluation="mosaic")
    shapes = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree
    )
    params = shapes(parameters(MODEL, policy, ONE))
    cache = jax.eval_shape(
        lambda: caches.create(MODEL, policy, ONE, pages=5, slots=3, per_layer=not whole)
    )
    batch = build([], PIECES, PAGE, whole=whole)

    def hidden(embed, params, batch, cache):
        params = {**params, "embed": embed}
        return forward(params, batch, cache, model=MODEL, policy=policy, layout=ONE, remat=True)[0]

    def gradient(embed, *rest):
        x, pull = jax.vjp(lambda embed: hidden(embed, *rest), embed)
        return pull(x)

    jaxpr = jax.make_jaxpr(gradient if whole else hidden)(params["embed"], params, batch, cache)
    depths = lambda name: {d for found, d in primitives(jaxpr.jaxpr) if found == name}  # noqa: E731
    assert 1 in depths("wgmma_ref")  # kernels are in the loop over layers
    assert depths("cumsum") == {0}  # lists are not
