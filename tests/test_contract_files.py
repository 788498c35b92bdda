"""The contract as a file: canonical bytes, refusals, differences in words, enforcement."""

import dataclasses
import io

import pytest

from isojax.contract.build import constants
from isojax.contract.canonical import ContractError, bits, digest, dumps, readable
from isojax.contract.contract import SECTIONS, Contract, from_bytes, load
from isojax.contract.diff import diff
from isojax.contract.enforce import check_pinned, check_resume, check_rollout
from isojax.numerics.policy import Policy
from isojax.sampler.request import Completion

POLICY = Policy()


def contract(policy: Policy = POLICY, **changed) -> Contract:
    """A small contract; `changed` replaces whole sections."""
    body = {"calls": 1, "bodies": "aa"}
    sections = {
        "model": {"model_type": "qwen3"},
        "vocabulary": ["embedding", "rows"],
        "policy": constants(policy),
        "training": {"learning_rate": bits(1e-6)},
        "environment": {"platform": "cpu", "packages": {"jax": "1"}, "xla_flags": {}},
        "definitions": {"isojax.numerics.trees.tree_sum": "00"},
        "ops": {"rows": {"source": "11", "kernels": ["matmul"], "arithmetic": ["add f32"]}},
        "cases": {"decode": {"between_ops": "22", "ops": {"rows": body}}},
        "equivalence": {},
        "claims": {"meshes": [], "states": []},
        "evidence": [],
        "deployment": {"inputs": "0", "sizes": {}, "programs": {}, "tiles": {}},
    }
    assert set(sections) == set(SECTIONS)
    return Contract(sections | changed)


OTHER = {
    "evaluation": "mosaic", "compute_dtype": "float32", "leaves": 4, "dot_width": 8, "chunk": 128,
    "kv_block": 32, "kv_segment": 2048, "vocab_leaves": 4, "vocab_block": 512, "batch_leaves": 4,
    "context_leaves": 2, "l2_epsilon": 1.0000000000000002e-6, "delta_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Policy)])
def test_every_constant_rotates_the_numerical_identity_and_is_named(name):
    old = contract()
    new = contract(dataclasses.replace(Policy(), **{name: OTHER[name]}))
    assert new.numerical != old.numerical
    assert new.semantic == old.semantic and new.deployment == old.deployment
    (change,) = diff(old, new)
    assert f"policy.{name}:" in change.what and change.identity == "numerical"


def test_round_trip_byte_for_byte(tmp_path):
    written = contract().with_evidence({"check": "canary", "compared": {"decode": 3}})
    written.save(tmp_path / "contract.json")
    data = (tmp_path / "contract.json").read_bytes()
    assert load(tmp_path).to_bytes() == data  # a run folder will do
    assert load(tmp_path).numerical == contract().numerical  # evidence is no identity


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: d[: len(d) // 2], "truncated"),
        (lambda d: d.replace(b'"jax": "1"', b'"jax": "2"'), "edited"),
        (lambda d: d.replace(b'"version": 1', b'"version": 7'), "version 7 is unknown"),
        (lambda d: d.replace(b"isojax-contract", b"something-else"), "not an execution contract"),
        (lambda d: d.replace(b"\n  ", b"\n    ", 1), "canonical"),
        (lambda d: d.replace(b'"calls": 1', b'"calls": 1.5'), "decimal float"),
        (lambda d: b"[]", "not an execution contract"),
        (lambda d: b"", "truncated"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, edit, reason):
    data = contract().to_bytes()
    assert edit(data) != data
    with pytest.raises(ContractError, match=reason):
        from_bytes(edit(data))


def test_a_forged_digest_does_not_hide_an_edit():
    document = contract().document()
    document["policy"]["leaves"] = 4
    body = {k: v for k, v in document.items() if k != "digest"}
    with pytest.raises(ContractError, match="identities"):
        from_bytes(dumps({**body, "digest": digest(body)}))


def test_floats_are_bit_patterns_only():
    with pytest.raises(ContractError, match="float"):
        dumps({"a": [1.5]})
    assert bits(1e-6) != bits(1.0000000000000002e-6)
    assert readable(bits(0.1)).startswith("0.1 (0x3fb9")
    assert bits(-0.0) != bits(0.0)


def test_diff_names_ops_kernels_versions_and_cases():
    op = {"source": "12", "kernels": ["matmul_swapped"], "arithmetic": ["add f32"]}
    new = contract(
        ops={"rows": op},
        definitions={"pallas_kernels.matmul.product": "1", "isojax.numerics.trees.tree_sum": "01"},
        environment={"platform": "cpu", "packages": {"jax": "2"}, "xla_flags": {"--off": False}},
        cases={"decode": {"between_ops": "22", "ops": {"rows": {"calls": 1, "bodies": "ab"}}}},
        deployment={
            "inputs": "0",
            "sizes": {},
            "programs": {},
            "tiles": {"pallas_kernels.tuning": "1"},
        },
    )
    said = [str(change) for change in diff(contract(), new)]
    assert "numerical: environment.packages jax: 1 -> 2" in said
    assert "numerical: environment.xla_flags --off: absent -> False" in said
    other = "op rows: other kernels: without matmul; with matmul_swapped (in decode)"
    assert f"numerical: {other}" in said
    assert "numerical: kernel source pallas_kernels.matmul.product is new" in said
    assert "numerical: definition isojax.numerics.trees.tree_sum changed" in said
    assert "numerical: case decode: other lowered text of rows" in said
    assert "deployment: tile table pallas_kernels.tuning changed" in said


def stamped(digest: str, version: int) -> Completion:
    return Completion(None, None, None, "length", weights_version=version, contract_digest=digest)


def test_the_trainer_refuses_rollouts_of_another_contract_or_other_weights():
    own = contract()
    check_rollout(own, [stamped(own.numerical, 3)] * 2, 3)
    with pytest.raises(ContractError, match="1 samples were made under numerical contract abc"):
        check_rollout(own, [stamped(own.numerical, 3), stamped("abc", 3)], 3)
    with pytest.raises(ContractError, match="weights of version 2, the trainer's are version 3"):
        check_rollout(own, [stamped(own.numerical, 2)], 3)
    with pytest.raises(ContractError, match="contract none"):
        check_rollout(own, [stamped("", 3)], 3)


def test_a_pinned_contract_holds_whatever_was_proved_under_it():
    check_pinned(contract(), contract(evidence=[{"check": "canary"}]))
    with pytest.raises(ContractError, match=r"policy\.leaves: 8 -> 4"):
        check_pinned(contract(), contract(Policy(leaves=4)))


def test_resuming_under_another_contract_needs_consent_and_prints_the_difference():
    old, new, out = contract(), contract(Policy(dot_width=8)), io.StringIO()
    assert check_resume(old, contract(), accept=False) == []
    with pytest.raises(ContractError, match="--accept-contract-change"):
        check_resume(old, new, accept=False)
    check_resume(old, new, accept=True, out=out)
    assert "policy.dot_width: 16 -> 8" in out.getvalue()
    with pytest.raises(ContractError, match="another model"):
        check_resume(old, contract(model={"model_type": "qwen3_moe"}), accept=True)
