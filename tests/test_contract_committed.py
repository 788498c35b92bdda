"""Contracts that are committed beside their configs still hold."""

import platform
from pathlib import Path

import pytest

from isojax import config_io
from isojax.contract.build import build
from isojax.contract.contract import load
from isojax.contract.diff import diff
from isojax.mesh import Layout
from isojax.runtime import REQUIRED_XLA_FLAGS

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.contract.json")), ids=lambda p: p.name)
def test_committed_contract_is_kept(path, monkeypatch):
    # the optimisation level that tests ask of XLA is no part of a run
    flags = " ".join(f"{name}={value}" for name, value in REQUIRED_XLA_FLAGS.items())
    monkeypatch.setenv("XLA_FLAGS", flags)
    pinned = load(path)
    environment = pinned["environment"]
    if environment["platform"] == "cpu" and environment["device"] != platform.machine():
        pytest.skip(f"a contract of {environment['device']} CPUs")
    config = config_io.load(path.with_name(path.name.replace(".contract.json", ".toml")))
    assert str(config.mesh) in pinned["deployment"]["programs"]
    assert all(Layout.parse(mesh) for mesh in pinned["deployment"]["sizes"])
    now = build(config, platform=environment["platform"], device=environment["device"], meshes=())
    moved = [str(change) for change in diff(pinned, now) if change.identity != "deployment"]
    assert pinned.numerical == now.numerical, "\n".join(moved)
