"""The blocks of the Qwen3 family, per rank: compositions of ops, with data movement between them.

Every function takes a layer's parameters, normed rows h [T, H] and what it needs of the call, and
gives rows [T, H]; both are this rank's rows of the residual stream.
"""

import dataclasses
from typing import Any

import jax

from isojax.batch import RaggedBatch
from isojax.cache import Cache
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.numerics.collectives import heads_to_rows, rows_to_heads
from isojax.numerics.policy import Policy
from isojax.ops.attention import attention
from isojax.ops.convolution import causal_convolution
from isojax.ops.elementwise import gated_add, sigmoid_gate, swiglu
from isojax.ops.experts import experts
from isojax.ops.gated_delta import gated_delta
from isojax.ops.linear import columns, rows, stream_linear
from isojax.ops.norm import gated_rms_norm, rms_norm
from isojax.ops.rotary import rotary
from isojax.ops.router import router

Parameters = dict
Table = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Static:
    """What a block is specialised to."""

    model: ModelConfig
    policy: Policy
    layout: Layout

    @property
    def ops(self) -> dict:
        return {"policy": self.policy, "layout": self.layout}

    @property
    def norm(self) -> dict:
        return {
            "epsilon": self.model.rms_norm_eps,
            "zero_centered": self.model.zero_centered_norm,
            **self.ops,
        }


def attention_block(
    p: Parameters,
    h: jax.Array,
    batch: RaggedBatch,
    cache: Cache,
    layer: jax.Array,
    table: Table,
    work: Any,
    s: Static,
) -> tuple[jax.Array, Cache]:
    """Grouped-query attention with q/k norm, rotary positions and, if the model has it, an output
    gate. table, work: what all layers share, of `rotary_table` and `attention_work`.
    """
    m = s.model
    gated = m.attention_output_gate
    copies = max(1, s.layout.model // m.num_key_value_heads)
    q, k, v, *gate = columns(
        h,
        (p["q"], p["k"], p["v"], *([p["gate"]] if gated else [])),
        copies=(1, copies, copies, *([1] if gated else [])),
        **s.ops,
    )
    q, k, v = (x.reshape(x.shape[0], -1, m.head_dim) for x in (q, k, v))
    q = rms_norm(q, p["q_norm"], heads=m.num_attention_heads, **s.norm)
    k = rms_norm(k, p["k_norm"], heads=m.num_key_value_heads, **s.norm)
    q, k = (rotary(x, *table, policy=s.policy) for x in (q, k))
    q, k, v = (rows_to_heads(x, s.layout) for x in (q, k, v))
    out, keys, values = attention(
        q, k, v, cache.keys, cache.values, layer, batch, work,
        kv_heads=m.num_key_value_heads, **s.ops,
    )  # fmt: skip
    out = heads_to_rows(out, s.layout)
    out = out.reshape(out.shape[0], -1)
    if gated:
        out = sigmoid_gate(out, gate[0], policy=s.policy)
    return rows(out, p["o"], **s.ops), dataclasses.replace(cache, keys=keys, values=values)


def delta_block(
    p: Parameters,
    h: jax.Array,
    batch: RaggedBatch,
    cache: Cache,
    layer: jax.Array,
    s: Static,
) -> tuple[jax.Array, Cache]:
    """Gated DeltaNet: convolution, gated delta rule, gated norm."""
    m, key_dim, value_dim = s.model, s.model.linear_key_head_dim, s.model.linear_value_head_dim
    q, k, v, z, b, a = columns(h, tuple(p[n] for n in ("q", "k", "v", "z", "b", "a")), **s.ops)
    heads = lambda x, width: x.reshape(x.shape[0], -1, width)  # noqa: E731
    flat = lambda x: x.reshape(x.shape[0], -1)  # noqa: E731
    dims = (key_dim, key_dim, value_dim, 1, 1)
    q, k, v, a, b = (
        flat(rows_to_heads(heads(x, dim), s.layout))
        for x, dim in zip((q, k, v, a, b), dims, strict=True)
    )
    taps = (p["conv_q"], p["conv_k"], p["conv_v"])
    (q, k, v), conv = causal_convolution((q, k, v), taps, cache.conv, layer, batch, **s.ops)
    out, delta = gated_delta(
        heads(q, key_dim), heads(k, key_dim), heads(v, value_dim), a, b,
        p["A_log"], p["dt_bias"], cache.delta, layer, batch, **s.ops,
    )  # fmt: skip
    out = gated_rms_norm(
        heads_to_rows(out, s.layout),
        heads(z, value_dim),
        p["norm"],
        epsilon=m.rms_norm_eps,
        heads=m.linear_num_value_heads,
        **s.ops,
    )
    y = rows(flat(out), p["out"], **s.ops)
    return y, dataclasses.replace(cache, conv=conv, delta=delta)


def mlp(p: Parameters, h: jax.Array, s: Static) -> jax.Array:
    """The dense SwiGLU feed-forward."""
    gate, up = columns(h, (p["gate"], p["up"]), **s.ops)
    return rows(swiglu(gate, up, policy=s.policy), p["down"], **s.ops)


def moe(p: Parameters, h: jax.Array, s: Static) -> jax.Array:
    """Routed experts, plus a gated shared expert if the model has one."""
    m = s.model
    weights, chosen = router(
        h, p["router"], top_k=m.num_experts_per_tok, normalise=m.norm_topk_prob, **s.ops
    )
    out = experts(h, weights, chosen, p["gate"], p["up"], p["down"], **s.ops)
    if "shared" in p:
        gate = stream_linear(h, p["shared_gate"], **s.ops)
        out = gated_add(out, mlp(p["shared"], h, s), gate, policy=s.policy)
    return out
