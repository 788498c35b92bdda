"""ModelConfig: the architecture of a Qwen3-family model, to and from a Hugging Face config.json."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
DENSE = "dense"
SPARSE = "sparse"

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_MIXTURE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
_SHARED_EXPERT = ("qwen3_next", "qwen3_5_moe")
_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the text model. Hashable, so it can be a static argument.

    model_type: one of MODEL_TYPES; decides the output gate, the form of the norms, the mixers.
    vocab_size: V, rows of the embedding.
    hidden_size: H, width of the residual stream.
    num_layers: decoder layers.
    layer_types: mixer of each layer, "full_attention" or "linear_attention" (Gated DeltaNet). A
      pattern shorter than num_layers is repeated to that length.
    mlp_layer_types: feed-forward of each layer, "dense" or "sparse" (experts); repeated likewise.
    num_attention_heads: query heads.
    num_key_value_heads: key and value heads.
    head_dim: width of an attention head.
    rotary_dim: leading components of a head that are rotated.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square in every RMS norm.
    intermediate_size: hidden width of dense layers (0 if there are none).
    num_experts: experts of a sparse layer (0 if there are none).
    num_experts_per_tok: experts that a token visits.
    moe_intermediate_size: hidden width of an expert.
    shared_expert_intermediate_size: hidden width of the shared expert (0 if there is none).
    norm_topk_prob: divide the kept routing probabilities by their sum.
    linear_num_key_heads: key and query heads of Gated DeltaNet.
    linear_num_value_heads: value heads of Gated DeltaNet.
    linear_key_head_dim: width of a key head.
    linear_value_head_dim: width of a value head.
    linear_conv_kernel_dim: taps of the causal convolution.
    tie_word_embeddings: the output projection is the embedding.
    max_position_embeddings: positions that the model was made for.
    eos_token_ids: ids that end a sequence.
    bos_token_id: id that starts a sequence, or None.
    pad_token_id: id of padding, or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    layer_types: tuple[str, ...] = (FULL_ATTENTION,)
    mlp_layer_types: tuple[str, ...] = (DENSE,)
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(
                f"model_type {self.model_type!r} is not one of {', '.join(MODEL_TYPES)}"
            )
        self._positive(
            "vocab_size", "hidden_size", "num_layers", "head_dim", "max_position_embeddings"
        )
        self._positive("num_attention_heads", "num_key_value_heads")
        self._repeat("layer_types", (FULL_ATTENTION, LINEAR_ATTENTION))
        self._repeat("mlp_layer_types", (DENSE, SPARSE))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and within (0, head_dim={self.head_dim}], "
                f"got {self.rotary_dim}"
            )
        if LINEAR_ATTENTION in self.layer_types:
            if self.model_type not in _HYBRID:
                raise ValueError(f"{self.model_type} has no linear_attention layers")
            self._positive("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
            self._positive("linear_value_head_dim", "linear_conv_kernel_dim")
            if self.linear_num_value_heads % self.linear_num_key_heads:
                raise ValueError(
                    f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                    f"linear_num_key_heads ({self.linear_num_key_heads})"
                )
        if DENSE in self.mlp_layer_types:
            self._positive("intermediate_size")
        if SPARSE in self.mlp_layer_types:
            if self.model_type not in _MIXTURE:
                raise ValueError(f"{self.model_type} has no sparse layers")
            self._positive("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            if self.model_type in _SHARED_EXPERT:
                self._positive("shared_expert_intermediate_size")
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds "
                    f"num_experts ({self.num_experts})"
                )

    def _positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def _repeat(self, name: str, allowed: tuple[str, ...]) -> None:
        pattern = tuple(getattr(self, name))
        unknown = sorted(set(pattern) - set(allowed))
        if unknown:
            raise ValueError(f"{name} holds {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        if not pattern or self.num_layers % len(pattern):
            raise ValueError(
                f"{name} has {len(pattern)} entries, which do not divide "
                f"num_layers ({self.num_layers})"
            )
        object.__setattr__(self, name, pattern * (self.num_layers // len(pattern)))

    @property
    def period(self) -> int:
        """Layers in the smallest unit that, repeated, is the whole stack."""
        kinds = list(zip(self.layer_types, self.mlp_layer_types, strict=True))
        return next(
            size
            for size in range(1, self.num_layers + 1)
            if self.num_layers % size == 0 and kinds == kinds[:size] * (self.num_layers // size)
        )

    @property
    def periods(self) -> int:
        """How often the period repeats."""
        return self.num_layers // self.period

    @property
    def attention_output_gate(self) -> bool:
        """Attention's output is multiplied by the sigmoid of half of the query projection."""
        return self.model_type in _HYBRID

    @property
    def zero_centered_norm(self) -> bool:
        """RMS norms scale by (1 + w); all but Gated DeltaNet's output norm, which scales by w."""
        return self.model_type in _HYBRID

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """The architecture that a Hugging Face config.json (or its `text_config`) describes.

        Keys that do not bear on the text model's forward are ignored.

        Raises:
          ValueError: one message with everything that is missing or not supported.
        """
        problems = _mistyped(config)
        if not problems and config.get("text_config"):
            problems = _mistyped(config["text_config"])
        if problems:
            raise ValueError("config.json: " + "; ".join(problems))
        text = {**config, **(config.get("text_config") or {})}
        if "tie_word_embeddings" in config:  # the outer flag is the one that transformers obeys
            text["tie_word_embeddings"] = config["tie_word_embeddings"]
        model_type = str(text.get("model_type", "")).removesuffix("_text")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"config.json: model_type {text.get('model_type')!r} is not supported; "
                f"supported: {', '.join(MODEL_TYPES)} (the last two also with the suffix _text)"
            )
        problems = _unsupported(text, model_type)
        required = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
        if model_type in _MIXTURE:
            text["num_experts"] = text.get("num_experts", text.get("num_local_experts"))
            required += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        if model_type in _SHARED_EXPERT:
            required += ["shared_expert_intermediate_size"]
        problems += [f"{key} is missing" for key in required if text.get(key) is None]
        if problems:
            raise ValueError("config.json: " + "; ".join(problems))
        layers = text["num_hidden_layers"]
        head_dim = text.get("head_dim") or (256 if model_type in _HYBRID else 128)
        sizes = {
            name: text[name]
            for name in (
                "intermediate_size",
                "rms_norm_eps",
                "max_position_embeddings",
                "tie_word_embeddings",
            )
            if text.get(name) is not None
        }
        theta, factor = _rotary(text, model_type)
        fields = dict(
            model_type=model_type,
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_layers=layers,
            layer_types=_layer_types(text, model_type),
            num_attention_heads=text["num_attention_heads"],
            num_key_value_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
            head_dim=head_dim,
            rotary_dim=int(head_dim * factor),
            rope_theta=float(theta),
            eos_token_ids=_ids(text.get("eos_token_id")),
            bos_token_id=text.get("bos_token_id"),
            pad_token_id=text.get("pad_token_id"),
            **sizes,
        )
        if model_type in _HYBRID:
            fields |= dict(
                linear_num_key_heads=text.get("linear_num_key_heads", 16),
                linear_num_value_heads=text.get("linear_num_value_heads", 32),
                linear_key_head_dim=text.get("linear_key_head_dim", 128),
                linear_value_head_dim=text.get("linear_value_head_dim", 128),
                linear_conv_kernel_dim=text.get("linear_conv_kernel_dim", 4),
            )
        if model_type in _MIXTURE:
            dense = set(text.get("mlp_only_layers") or ()) if model_type != "qwen3_5_moe" else set()
            step = (text.get("decoder_sparse_step") or 1) if model_type != "qwen3_5_moe" else 1
            sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
            # qwen3_moe takes the flag with False as its default; qwen3_5_moe always divides
            norm = {"qwen3_moe": text.get("norm_topk_prob", False), "qwen3_5_moe": True}
            fields |= dict(
                mlp_layer_types=tuple(SPARSE if value else DENSE for value in sparse),
                num_experts=text["num_experts"],
                num_experts_per_tok=text["num_experts_per_tok"],
                moe_intermediate_size=text["moe_intermediate_size"],
                norm_topk_prob=norm.get(model_type, text.get("norm_topk_prob", True)),
            )
        if model_type in _SHARED_EXPERT:
            fields["shared_expert_intermediate_size"] = text["shared_expert_intermediate_size"]
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """A config.json dict of the text model that transformers loads; `from_hf` gives it back.

        dtype: name of the dtype that the checkpoint's tensors have.
        """
        suffix = "_text" if self.model_type.startswith("qwen3_5") else ""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        eos = list(self.eos_token_ids)
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type + suffix,
            "dtype": dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.intermediate_size:
            config["intermediate_size"] = self.intermediate_size
        if self.model_type in _HYBRID:
            rope["partial_rotary_factor"] = self.rotary_dim / self.head_dim
            config["layer_types"] = list(self.layer_types)
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
                config[f"linear_{name}"] = getattr(self, f"linear_{name}")
            config["linear_conv_kernel_dim"] = self.linear_conv_kernel_dim
        if self.model_type in _MIXTURE:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
            }
        if self.model_type in _SHARED_EXPERT:
            config["shared_expert_intermediate_size"] = self.shared_expert_intermediate_size
        if self.model_type in ("qwen3_moe", "qwen3_next"):
            config["decoder_sparse_step"] = 1
            kinds = enumerate(self.mlp_layer_types)
            config["mlp_only_layers"] = [layer for layer, kind in kinds if kind == DENSE]
        return config


_INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval",
    "decoder_sparse_step", "bos_token_id", "pad_token_id",
)  # fmt: skip
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
_FLAGS = (
    "tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "attention_bias",
    "attn_output_gate",
)  # fmt: skip
_ROPES = ("rope_scaling", "rope_parameters")


def _integer(value: Any) -> bool:
    return type(value) is int


def _number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _mistyped(config: Mapping[str, Any]) -> list[str]:
    """The keys that are read, and do not hold what they should; null stands for a missing key."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(_INTEGERS, (_integer, "an integer")),
        **dict.fromkeys(_NUMBERS, (_number, "a finite number")),
        **dict.fromkeys(_FLAGS, (lambda value: isinstance(value, bool), "true or false")),
        **dict.fromkeys(
            ("text_config", *_ROPES), (lambda value: isinstance(value, Mapping), "an object")
        ),
        "layer_types": (_list_of(lambda value: isinstance(value, str)), "a list of strings"),
        "mlp_only_layers": (_list_of(_integer), "a list of integers"),
        "eos_token_id": (
            lambda value: _integer(value) or _list_of(_integer)(value),
            "an integer or a list of integers",
        ),
    }
    problems = [
        f"{key} is {json.dumps(config[key], default=str)[:40]}, not {wanted}"
        for key, (good, wanted) in kinds.items()
        if config.get(key) is not None and not good(config[key])
    ]
    for rope in _ROPES:
        inner = config.get(rope)
        if isinstance(inner, Mapping):
            problems += [f"{rope}.{problem}" for problem in _mistyped(inner)]
    return problems


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _layer_types(text: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    if model_type not in _HYBRID:
        return (FULL_ATTENTION,)
    interval = text.get("full_attention_interval") or 4
    return tuple(
        LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION
        for layer in range(text["num_hidden_layers"])
    )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, which older files keep in `rope_scaling` and at the top level."""
    return {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}


def _rotary(text: Mapping[str, Any], model_type: str) -> tuple[float, float]:
    rope = _rope(text)
    theta = rope.get("rope_theta", text.get("rope_theta")) or 10_000.0
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if model_type not in _HYBRID:
        return theta, 1.0
    return theta, 0.25 if factor is None else factor


def _unsupported(text: Mapping[str, Any], model_type: str) -> list[str]:
    """What the file asks for and the forward does not do."""
    problems = []
    rope = _rope(text)
    if any(isinstance(value, Mapping) for value in rope.values()):
        problems.append("rotary settings that differ between layer types are not supported")
    for key in _ROPES:
        settings = text.get(key) or {}
        rope_type = settings.get("rope_type", settings.get("type", "default"))
        # mrope gives text three equal position ids, which is the ordinary rotary embedding
        if rope_type not in ("default", "mrope"):
            problems.append(f"{key}: rope_type {rope_type!r} is not supported (only 'default')")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and model_type not in _HYBRID:
        problems.append(f"partial_rotary_factor is not supported for {model_type}")
    if text.get("use_sliding_window") or "sliding_attention" in (text.get("layer_types") or ()):
        problems.append("sliding-window attention is not supported")
    if text.get("attention_bias"):
        problems.append("attention_bias is not supported")
    if text.get("attention_dropout"):
        problems.append("attention_dropout is not supported")
    if text.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {text['hidden_act']!r} is not supported (only 'silu')")
    if text.get("attn_output_gate") is False and model_type in _HYBRID:
        problems.append(f"attn_output_gate = false is not supported for {model_type}")
    return problems
