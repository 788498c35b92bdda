"""The contract of a run: what moves its identities, what it proves, what it refuses to build."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jsonschema
import pytest

import isojax.forward as forward_module
from isojax import config_io
from isojax.config import SamplerConfig
from isojax.contract import cases, command, startup
from isojax.contract.__main__ import main
from isojax.contract.audit import findings
from isojax.contract.build import build, inputs, training
from isojax.contract.canonical import ContractError
from isojax.contract.claims import refusal
from isojax.contract.contract import Contract, from_bytes, load, schema
from isojax.contract.diff import diff
from isojax.contract.sources import Sources
from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.ops.elementwise import add
from isojax.sampler import executor
from tests.contract_util import DENSE, HYBRID, run_config

ROOT = Path(__file__).parent.parent


NARROW = Policy(dot_width=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("contracts")


@pytest.fixture(scope="module")
def dense(folder):
    """As the command builds it."""
    (folder / "run.toml").write_text(config_io.to_toml(run_config(DENSE)))
    pinned = folder / "run.contract.json"
    assert main(["build", "--config", str(folder / "run.toml"), "-o", str(pinned)]) == 0
    return load(pinned)


@pytest.fixture(scope="module")
def narrow():
    """With another constant."""
    return build(run_config(DENSE, policy=NARROW))


@pytest.fixture(scope="module")
def hybrid():
    return build(run_config(HYBRID), meshes=())


@pytest.fixture
def built_once(dense, narrow, monkeypatch):
    """Command and startup get these two where they would build them again."""
    known = {contract["deployment"]["inputs"]: contract for contract in (dense, narrow)}

    def again(config, *, platform, device, meshes=None):
        contract = known[inputs(config, platform, device, Sources())]
        wanted = [config.mesh] if meshes is None else meshes
        assert {str(mesh) for mesh in wanted} <= set(contract["deployment"]["programs"])
        return contract

    monkeypatch.setattr(command, "build", again)
    monkeypatch.setattr(startup, "build", again)


def test_another_checkout_and_process_give_the_same_digest(dense, tmp_path):
    """Blank lines and comments above every definition, another folder, another process."""
    for package in ("isojax", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package)
        for path in (tmp_path / package).rglob("*.py"):
            text = path.read_text().replace("\ndef ", "\n\n\n# moved down\ndef ")
            path.write_text(text)
    (tmp_path / "run.toml").write_text(config_io.to_toml(run_config(DENSE)))
    (tmp_path / "go.py").write_text(
        "import sys\nfrom isojax import config_io\nfrom isojax.contract.build import build\n"
        "print(build(config_io.load(sys.argv[1]), meshes=()).numerical)\n"
    )
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=3")
    done = subprocess.run(
        [sys.executable, "go.py", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == dense.numerical, done.stderr[-2000:]


def test_buckets_pages_and_mesh_are_deployment_and_caches_nothing(dense):
    jax.clear_caches()  # what jax still holds decides which functions a program has twice
    sampler = SamplerConfig(max_tokens=64, max_sequences=4, max_batch_tokens=512, pages=50)
    other = build(run_config(DENSE, sampler=sampler), meshes=[Layout(2, 1)])
    assert other.numerical == dense.numerical
    assert other.deployment != dense.deployment
    jsonschema.validate(json.loads(other.to_bytes()), schema())
    assert set(other["deployment"]["programs"]["2x1"]) == {
        "decode", "mixed", "train_score", "train_step",
    }  # fmt: skip


def test_rows_of_a_leaf_are_numerical(dense):
    """Which sequences share a leaf orders the sums of their gradients."""
    config = run_config(DENSE)
    more = dataclasses.replace(config.trainer, microbatch_tokens=512)
    assert training(dataclasses.replace(config, trainer=more)) != dense["training"]


def test_a_constant_moves_the_lowered_text_of_the_ops_that_read_it(dense, narrow):
    said = [str(change) for change in diff(dense, narrow)]
    assert "numerical: policy.dot_width: 16 -> 8" in said
    (decode,) = (line for line in said if line.startswith("numerical: case decode"))
    assert "rows" in decode and "rotary" not in decode


def test_text_proves_all_but_the_ops_that_walk_pieces(hybrid):
    found = hybrid["equivalence"]
    assert set(found) == {"decode", "prefill", "mixed", "train_forward", "train_recompute"}
    calls = {entry["calls"] for entry in found.values()}
    assert calls == {len(hybrid["vocabulary"]) - 1}  # the rotary table reads no weight
    for case in ("decode", "prefill", "mixed"):
        by_canary = {op for op, proof in found[case]["ops"].items() if proof == "canary"}
        assert by_canary == ({"attention", "gated_delta"} if case == "decode" else set())
        assert set(found[case]["ops"]) == set(hybrid["vocabulary"])
    for case in ("decode", "prefill", "mixed", "train_score"):
        assert hybrid["cases"][case]["rows_erased"]


def test_the_document_round_trips_and_follows_its_schema(hybrid):
    data = hybrid.to_bytes()
    assert from_bytes(data).to_bytes() == data
    jsonschema.validate(json.loads(data), schema())


def test_a_sampler_with_an_op_of_its_own_is_refused(monkeypatch):
    def forward(*args, **kwargs):
        hidden, cache = plain(*args, **kwargs)
        return add(hidden, hidden, policy=kwargs["policy"]), cache

    plain = executor.forward
    monkeypatch.setattr(executor, "forward", forward)
    with pytest.raises(ContractError, match="decode calls other ops than train_score: call"):
        build(run_config(DENSE), meshes=())


def test_a_sampler_that_moves_rows_otherwise_is_refused(monkeypatch):
    plain, norm = executor.forward, forward_module.rms_norm

    def twisted(*args, **kwargs):
        """The forward, with its rows in reverse under every norm."""
        with monkeypatch.context() as patch:
            patch.setattr(
                forward_module, "rms_norm", lambda x, *rest, **named: norm(x[::-1], *rest, **named)
            )
            return plain(*args, **kwargs)

    monkeypatch.setattr(executor, "forward", twisted)
    with pytest.raises(ContractError, match="decode moves rows between ops otherwise"):
        build(run_config(DENSE), meshes=())


def test_meshes_are_claims_with_reasons(dense):
    by_mesh = {item["mesh"]: item for item in dense["claims"]["meshes"]}
    assert by_mesh["8x1"]["admitted"] and by_mesh["2x4"]["admitted"]
    assert not by_mesh["1x8"]["admitted"] and "num_attention_heads" in by_mesh["1x8"]["reason"]
    assert "batch_leaves" in refusal(DENSE, Policy(), Layout(3, 1))
    with pytest.raises(
        ContractError,
        match="mesh 3x1 is not admitted: 3 data ranks.*nearest that are: 1x2, 1x4, 2x1",
    ):
        build(run_config(DENSE), meshes=[Layout(3, 1)])


def test_the_mosaic_evaluation_needs_cuda_and_unknown_cases_are_refused():
    config = run_config(DENSE, policy=Policy(evaluation="mosaic"))
    with pytest.raises(ContractError, match="no CPU program"):
        build(config)
    lowering = cases.Lowering(run_config(DENSE), Layout(), "cpu")
    with pytest.raises(ContractError, match="unknown case 'speculative'"):
        lowering.traced("speculative", cases.probe(Policy(), 3, 23))


def test_the_audit_reads_the_calls_that_run(monkeypatch):
    config = run_config(DENSE)
    assert findings(config, "cpu", [Layout(), Layout(2, 2)]) == []

    def forward(*args, **kwargs):
        hidden, cache = plain(*args, **kwargs)
        return hidden * 2, cache

    plain = executor.forward
    monkeypatch.setattr(executor, "forward", forward)
    assert "mul" in findings(config, "cpu", [Layout()])[0]


def test_prefill_and_mixed_are_one_program(dense):
    prefill, mixed = dense["cases"]["prefill"], dense["cases"]["mixed"]
    assert {**prefill, "what": ""} == {**mixed, "what": ""}
    assert dataclasses.asdict(cases.probe(Policy(), 3, 23))["mixed"]["piece_rows"] == 64


def test_the_command_shows_compares_and_verifies(dense, built_once, tmp_path, capsys):
    pinned, config = tmp_path / "run.contract.json", tmp_path / "run.toml"
    dense.save(pinned)
    config.write_text(config_io.to_toml(run_config(DENSE)))
    assert main(["verify", str(pinned)]) == 0
    assert f"kept, numerical {dense.numerical}" in capsys.readouterr().out
    assert main(["show", str(pinned)]) == 0
    assert "admitted meshes: 1x1" in capsys.readouterr().out
    config.write_text(config_io.to_toml(run_config(DENSE, policy=NARROW)))
    assert main(["verify", str(pinned)]) == 1
    assert "policy.dot_width: 16 -> 8" in capsys.readouterr().out
    sections = {**dense.sections, "deployment": {**dense["deployment"], "sizes": {}}}
    Contract(sections).save(tmp_path / "run" / "contract.json")
    assert main(["diff", str(pinned), str(tmp_path / "run")]) == 0
    assert "deployment: mesh 1x1 is gone" in capsys.readouterr().out
    pinned.write_bytes(pinned.read_bytes()[:-20])
    assert main(["verify", str(pinned), "--file-only"]) == 2
    assert "truncated" in capsys.readouterr().err


def test_a_run_recalls_its_contract_and_keeps_the_pinned_one(
    dense, built_once, tmp_path, monkeypatch
):
    config = run_config(DENSE, runs_dir=str(tmp_path))
    first = startup.of_run(config)
    with monkeypatch.context() as patch:
        patch.setattr(startup, "build", None)  # must not be needed again
        assert startup.of_run(config).to_bytes() == first.to_bytes()
        first.save(tmp_path / "pinned.json")
        (tmp_path / ".contracts").rename(tmp_path / "elsewhere")
        assert startup.of_run(config, pinned=tmp_path / "pinned.json").numerical == first.numerical
    moved = dataclasses.replace(config, policy=NARROW)
    with pytest.raises(ContractError, match=r"pinned contract is broken.*\n.*policy\.dot_width"):
        startup.of_run(moved, pinned=tmp_path / "pinned.json")


@pytest.mark.parametrize("option", ["jax_enable_x64", "jax_disable_jit"])
def test_options_under_which_nothing_is_defined_are_refused(option):
    before = jax.config.values[option]
    jax.config.update(option, True)
    try:
        with pytest.raises(ContractError, match=option):
            build(run_config(DENSE))
    finally:
        jax.config.update(option, before)
