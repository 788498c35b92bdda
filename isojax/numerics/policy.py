"""Every constant that can move a bit, in one frozen record.

The execution contract hashes these fields as bit patterns. What is not here (bucket sizes, tiles,
page placement, mesh shape) must not be able to move one.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

Evaluation = Literal["reference", "mosaic"]
DTypeName = Literal["bfloat16", "float32"]


KERNEL_LEAVES = 64  # what `pallas_kernels.tuning_table` has a tile with room for


@dataclasses.dataclass(frozen=True)
class Policy:
    """Numerical identity of the forward and backward. Hashable, so it can be a static argument.

    evaluation: which of an op's two evaluations is installed.
    compute_dtype: dtype of weights, activations, cached keys and values, and of every operand that
      is rounded before a product. Sums are always float32.
    leaves: G, the number of equal leaves of a contraction that a mesh axis may cut (a power of
    two).
    dot_width: products that are added by a halving tree before they join the running sum of a dot
      (a power of two; reference evaluation).
    chunk: tokens of a Gated DeltaNet chunk; its state is folded at multiples of it.
    kv_block: keys that one step of the online softmax covers.
    kv_segment: keys that one softmax state covers before states are merged, in order.
    vocab_leaves: leaves of the log-sum-exp over the vocabulary.
    vocab_block: logits that one step of a vocabulary leaf covers (256 in the Hopper evaluation).
    batch_leaves: groups of sequences, in number, that every sum over tokens in the backward keeps
      apart until its tree joins them.
    context_leaves: equal runs of rows into which each such group is cut; sequences may cross them.
    l2_epsilon: added to the squared norm of Gated DeltaNet's queries and keys.
    delta_dtype: dtype to which Gated DeltaNet's u, w, d, score matrix and the state's operand copy
      are rounded; the state itself stays float32.
    """

    evaluation: Evaluation = "reference"
    compute_dtype: DTypeName = "bfloat16"
    leaves: int = 8
    dot_width: int = 16
    chunk: int = 64
    kv_block: int = 64
    kv_segment: int = 4096
    vocab_leaves: int = 8
    vocab_block: int = 256
    batch_leaves: int = 8
    context_leaves: int = 1
    l2_epsilon: float = 1e-6
    delta_dtype: DTypeName = "bfloat16"

    def __post_init__(self) -> None:
        for name in (
            "leaves", "dot_width", "chunk", "kv_block", "vocab_leaves", "batch_leaves",
            "context_leaves",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.vocab_block < 1:
            raise ValueError(f"vocab_block must be at least 1, got {self.vocab_block}")
        if self.kv_segment < 1 or self.kv_segment % self.kv_block:
            raise ValueError(
                f"kv_segment must be a multiple of kv_block ({self.kv_block}), "
                f"got {self.kv_segment}"
            )
        if self.evaluation == "mosaic" and max(self.leaves, self.row_leaves) > KERNEL_LEAVES:
            raise ValueError(
                f"the Hopper kernels hold the sums of at most {KERNEL_LEAVES} leaves; leaves is "
                f"{self.leaves}, batch_leaves times context_leaves {self.row_leaves}"
            )
        if not 0 <= self.l2_epsilon < float("inf"):
            raise ValueError(f"l2_epsilon must be finite and at least 0, got {self.l2_epsilon}")

    @property
    def row_leaves(self) -> int:
        """Leaves of every sum over the rows of a training call."""
        return self.batch_leaves * self.context_leaves

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype as a jax dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def delta(self) -> jnp.dtype:
        """The rounding dtype of Gated DeltaNet; float32 compute rounds nothing."""
        return jnp.dtype(self.delta_dtype if self.compute_dtype == "bfloat16" else "float32")
