"""What the contract asserts of the world around the arithmetic: meshes, states that go stale."""

from typing import Any

from isojax.contract.canonical import ContractError
from isojax.mesh import Layout
from isojax.models.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from isojax.models.params import check_layout
from isojax.numerics.collectives import leaf_count
from isojax.numerics.policy import Policy


def refusal(model: ModelConfig, policy: Policy, layout: Layout) -> str | None:
    """Why a mesh would move bits or cannot hold the model; None where it is admitted."""
    reasons = []
    try:
        check_layout(model, layout)
    except ValueError as error:
        reasons.append(str(error))
    if policy.batch_leaves % layout.data:
        reasons.append(
            f"{layout.data} data ranks do not divide policy.batch_leaves = {policy.batch_leaves}"
        )
    elif policy.row_leaves % (layout.data * layout.stream_ranks):
        reasons.append(
            f"rows are cut into {layout.data * layout.stream_ranks} runs, which do not divide "
            f"policy.batch_leaves * policy.context_leaves = {policy.row_leaves}: raise "
            "policy.context_leaves"
        )
    for what, size in _contractions(model).items():
        leaves = leaf_count(size, policy.leaves)
        if leaves % layout.model:
            reasons.append(
                f"{what}: the {leaves} leaves of a contraction over {size} are not whole on "
                f"{layout.model} model ranks"
            )
    if policy.vocab_leaves % layout.model:
        reasons.append(
            f"{layout.model} model ranks do not divide policy.vocab_leaves = {policy.vocab_leaves}"
        )
    return "; ".join(reasons) or None


def check_mesh(model: ModelConfig, policy: Policy, layout: Layout) -> None:
    """A run may start on this mesh.

    Raises:
      ContractError: with the reason, and the admitted meshes of the nearest number of devices.
    """
    reason = refusal(model, policy, layout)
    if reason is None:
        return
    others = [Layout.parse(item["mesh"]) for item in meshes(model, policy) if item["admitted"]]
    gap = min((abs(other.devices - layout.devices) for other in others), default=0)
    near = [str(other) for other in others if abs(other.devices - layout.devices) == gap]
    raise ContractError(
        f"mesh {layout} is not admitted: {reason}; nearest that are: {', '.join(near) or 'none'}"
    )


def _contractions(model: ModelConfig) -> dict[str, int]:
    """Lengths of the sums that the "model" axis cuts."""
    sizes = {}
    if FULL_ATTENTION in model.layer_types:
        sizes["attention output"] = model.num_attention_heads * model.head_dim
    if LINEAR_ATTENTION in model.layer_types:
        sizes["Gated DeltaNet output"] = model.linear_num_value_heads * model.linear_value_head_dim
    if model.intermediate_size:
        sizes["feed-forward"] = model.intermediate_size
    if model.shared_expert_intermediate_size:
        sizes["shared expert"] = model.shared_expert_intermediate_size
    return sizes


def meshes(model: ModelConfig, policy: Policy) -> list[dict[str, Any]]:
    """Every mesh of powers of two up to the leaves' numbers: admitted, or why not."""
    powers = [1 << i for i in range(max(policy.batch_leaves, policy.leaves).bit_length())]
    out = []
    for data in powers:
        for ranks in powers:
            layout = Layout(data, ranks)
            reason = refusal(model, policy, layout)
            out.append({"mesh": str(layout), "admitted": reason is None, "reason": reason})
    return out


# what derives from what; stale the moment its source moves
STATES: list[dict[str, Any]] = [
    {
        "state": "cached keys and values, Gated DeltaNet and convolution state",
        "derives_from": ["weights", "tokens before"],
        "invalidated_by": ["weights updated", "another contract", "page or slot reassigned"],
    },
    {
        "state": "pages of a prompt that samples share",
        "derives_from": ["weights", "the prompt"],
        "invalidated_by": ["weights updated", "another contract"],
    },
    {
        "state": "log-probabilities and thresholds of a rollout",
        "derives_from": ["weights", "numerical digest"],
        "invalidated_by": ["another contract"],
    },
    {
        "state": "bfloat16 weights",
        "derives_from": ["float32 master weights"],
        "invalidated_by": ["optimizer step"],
    },
]
