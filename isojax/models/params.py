"""The parameter tree as data: each parameter's name, shape, dtype, sharding and distribution.

Weights are stored [in, out]. Layers repeat with a period, so a layer's parameters are stacked over
the periods (leading axis n) and `layers` has one entry a position of the period:

    {"embed": [V, H], "norm": [H], "lm_head": [H, V] (unless tied), "layers": ({
       "input_norm": [n, H], "post_norm": [n, H],
       "attn": {"q", "gate": [n, H, Hq*D], "k", "v": [n, H, Hkv*D], "q_norm", "k_norm": [n, D],
                "o": [n, Hq*D, H]}
       or "gdn": {"q", "k": [n, H, Hk*K], "v", "z": [n, H, Hv*V], "b", "a": [n, H, Hv],
                  "conv_q", "conv_k", "conv_v": [n, channels, width],
                  "A_log", "dt_bias": [n, Hv] float32, "norm": [n, V], "out": [n, Hv*V, H]},
       "mlp": {"gate", "up": [n, H, I], "down": [n, I, H]}
       or "moe": {"router": [n, H, E], "gate", "up": [n, E, H, I], "down": [n, E, I, H],
                  "shared": {"gate", "up", "down"}, "shared_gate": [n, H, 1]}}, ...)}

"model" cuts the outputs of a layer's first maps and the inputs of its last, so heads and hidden
widths stay whole on a rank; "data" and "model" together cut the experts; everything else is on
every rank.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isojax.mesh import MODEL, ROWS, Layout
from isojax.models.config import DENSE, FULL_ATTENTION, LINEAR_ATTENTION, SPARSE, ModelConfig
from isojax.numerics.policy import Policy

Params = dict[str, Any]
Init = Literal["normal", "zeros", "ones", "A_log", "dt_bias"]

REPLICATED = PartitionSpec()
COLUMN = PartitionSpec(None, None, MODEL)
ROW = PartitionSpec(None, MODEL, None)
HEADS = PartitionSpec(None, MODEL)
EXPERTS = PartitionSpec(None, (*ROWS, MODEL), None, None)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the tree.

    name: its path, such as "layers.0.attn.q".
    shape: the global shape.
    dtype: how it is stored.
    spec: which mesh axes cut it.
    init: the distribution of its first values.
    std: their standard deviation, for "normal".
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    init: Init = "normal"
    std: float = 1.0

    @property
    def key(self) -> str:
        """The name within a layer ("attn.q"), or the whole name outside the layers."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name

    @property
    def position(self) -> int | None:
        """The layer's position in the period; None outside the layers."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Check that the mesh can cut the model.

    Raises:
      ValueError: naming every count that the mesh does not divide.
    """
    counts, heads = {"vocab_size": config.vocab_size}, {}
    wrong = []
    if FULL_ATTENTION in config.layer_types:
        heads["num_attention_heads"] = config.num_attention_heads
        for ranks in dict.fromkeys((layout.model, layout.head_ranks)):
            few, many = sorted((config.num_key_value_heads, ranks))
            if many % few:
                wrong.append(
                    f"num_key_value_heads ({config.num_key_value_heads}) and {ranks} ranks that "
                    "share heads: one must divide the other"
                )
    if LINEAR_ATTENTION in config.layer_types:
        heads["linear_num_key_heads"] = config.linear_num_key_heads
        heads["linear_num_value_heads"] = config.linear_num_value_heads
    if DENSE in config.mlp_layer_types:
        counts["intermediate_size"] = config.intermediate_size
    if SPARSE in config.mlp_layer_types:
        if config.shared_expert_intermediate_size:
            counts["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        if config.num_experts % layout.devices:
            wrong.append(
                f"num_experts ({config.num_experts}) does not divide by {layout.devices} ranks"
            )
    named = "model" if layout.context == 1 else "model times context"
    for ranks, kind, sizes in (
        (layout.model, "model", counts),
        (layout.head_ranks, named, heads),
    ):
        wrong += [
            f"{name} ({size}) does not divide by {ranks} {kind} ranks"
            for name, size in sizes.items()
            if size % ranks
        ]
    if wrong:
        raise ValueError(f"a {layout} mesh cannot cut this model: " + "; ".join(wrong))


def parameters(config: ModelConfig, policy: Policy, layout: Layout) -> Params:
    """The tree, with a `Parameter` in place of each array.

    Raises:
      ValueError: if the mesh cannot cut the model.
    """
    check_layout(config, layout)
    build = _Builder(config, policy.dtype, layout)
    hidden, vocab = config.hidden_size, config.vocab_size
    # a tied embedding is the output map too, which wants unit logits; alone, it sets the
    # residual's scale
    scale = hidden**-0.5 if config.tie_word_embeddings else 1.0
    tree: Params = {
        "embed": build.weight("embed", (vocab, hidden), PartitionSpec(MODEL, None), scale),
        "norm": build.norm("norm", (hidden,)),
        "layers": tuple(build.layer(position) for position in range(config.period)),
    }
    if not config.tie_word_embeddings:
        spec = PartitionSpec(None, MODEL)
        tree["lm_head"] = build.weight("lm_head", (hidden, vocab), spec, hidden**-0.5)
    return tree


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Parameters of a model, named by their path."""

    config: ModelConfig
    dtype: np.dtype
    layout: Layout

    def weight(
        self, name: str, shape: tuple[int, ...], spec: PartitionSpec, std: float
    ) -> Parameter:
        return Parameter(name, shape, self.dtype, spec, "normal", std)

    def norm(self, name: str, shape: tuple[int, ...]) -> Parameter:
        init: Init = "zeros" if self.config.zero_centered_norm else "ones"
        return Parameter(name, shape, self.dtype, REPLICATED, init)

    def column(self, name: str, outputs: int, spec: PartitionSpec = COLUMN) -> Parameter:
        """A map from the residual: rows of unit scale give outputs of unit scale."""
        inputs = self.config.hidden_size
        shape = (self.config.periods, inputs, outputs)
        return self.weight(name, shape, spec, inputs**-0.5)

    def row(self, name: str, inputs: int) -> Parameter:
        """A map into the residual, scaled so that all layers together add unit variance."""
        shape = (self.config.periods, inputs, self.config.hidden_size)
        return self.weight(name, shape, ROW, self.residual_std(inputs))

    def residual_std(self, inputs: int) -> float:
        return (2 * self.config.num_layers * inputs) ** -0.5

    def layer(self, position: int) -> Params:
        name, config = f"layers.{position}.", self.config
        norm = (config.periods, config.hidden_size)
        tree: Params = {
            "input_norm": self.norm(name + "input_norm", norm),
            "post_norm": self.norm(name + "post_norm", norm),
        }
        if config.layer_types[position] == FULL_ATTENTION:
            tree["attn"] = self.attention(name + "attn.")
        else:
            tree["gdn"] = self.gated_delta(name + "gdn.")
        if config.mlp_layer_types[position] == SPARSE:
            tree["moe"] = self.experts(name + "moe.")
        else:
            tree["mlp"] = self.mlp(name + "mlp.", config.intermediate_size)
        return tree

    def attention(self, name: str) -> Params:
        config = self.config
        dim, queries, pairs = (
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        # heads that ranks outnumber are whole on every rank, which takes its own (see `columns`)
        shared = REPLICATED if self.layout.model > pairs else COLUMN
        tree = {
            "q": self.column(name + "q", queries * dim),
            "k": self.column(name + "k", pairs * dim, shared),
            "v": self.column(name + "v", pairs * dim, shared),
            "q_norm": self.norm(name + "q_norm", (config.periods, dim)),
            "k_norm": self.norm(name + "k_norm", (config.periods, dim)),
            "o": self.row(name + "o", queries * dim),
        }
        if config.attention_output_gate:
            tree["gate"] = self.column(name + "gate", queries * dim)
        return tree

    def gated_delta(self, name: str) -> Params:
        config, n = self.config, self.config.periods
        key = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        value, width = heads * config.linear_value_head_dim, config.linear_conv_kernel_dim

        def convolution(part: str, channels: int) -> Parameter:
            return self.weight(name + part, (n, channels, width), ROW, width**-0.5)

        def per_head(part: Literal["A_log", "dt_bias"]) -> Parameter:
            return Parameter(name + part, (n, heads), np.dtype(np.float32), HEADS, part)

        return {
            "q": self.column(name + "q", key),
            "k": self.column(name + "k", key),
            "v": self.column(name + "v", value),
            "z": self.column(name + "z", value),
            "b": self.column(name + "b", heads),
            "a": self.column(name + "a", heads),
            "conv_q": convolution("conv_q", key),
            "conv_k": convolution("conv_k", key),
            "conv_v": convolution("conv_v", value),
            "A_log": per_head("A_log"),
            "dt_bias": per_head("dt_bias"),
            # plain in every model, also where the others are centred at zero
            "norm": Parameter(
                name + "norm", (n, config.linear_value_head_dim), self.dtype, REPLICATED, "ones"
            ),
            "out": self.row(name + "out", value),
        }

    def mlp(self, name: str, width: int) -> Params:
        return {
            "gate": self.column(name + "gate", width),
            "up": self.column(name + "up", width),
            "down": self.row(name + "down", width),
        }

    def experts(self, name: str) -> Params:
        config, n, hidden = self.config, self.config.periods, self.config.hidden_size
        count, width = config.num_experts, config.moe_intermediate_size

        def expert(part: str, inputs: int, outputs: int, std: float) -> Parameter:
            return self.weight(name + part, (n, count, inputs, outputs), EXPERTS, std)

        tree: Params = {
            "router": self.column(name + "router", count, REPLICATED),
            "gate": expert("gate", hidden, width, hidden**-0.5),
            "up": expert("up", hidden, width, hidden**-0.5),
            "down": expert("down", width, hidden, self.residual_std(width)),
        }
        if config.shared_expert_intermediate_size:
            tree["shared"] = self.mlp(name + "shared.", config.shared_expert_intermediate_size)
            tree["shared_gate"] = self.column(name + "shared_gate", 1, REPLICATED)
        return tree


def specs(config: ModelConfig, policy: Policy, layout: Layout) -> Params:
    """The tree with each array's PartitionSpec: what `shard_map` is told of the parameters."""
    return jax.tree.map(lambda p: p.spec, parameters(config, policy, layout))


def shapes(config: ModelConfig, policy: Policy, layout: Layout, mesh: Mesh) -> Params:
    """The tree with each array's ShapeDtypeStruct and sharding, to lower or to restore into."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, p.spec)),
        parameters(config, policy, layout),
    )


def count(config: ModelConfig) -> int:
    """How many numbers the model has."""
    tree = parameters(config, Policy(), Layout())
    return sum(math.prod(p.shape) for p in jax.tree.leaves(tree))
