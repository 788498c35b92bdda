"""The canary and the bisecting dump: silent when all is well, precise when a fault is planted."""

import functools

import numpy as np
import pytest

from isojax.config import SamplerConfig
from isojax.contract import startup
from isojax.contract.bisect import Bisector
from isojax.contract.canonical import ContractError
from isojax.contract.contract import Contract
from isojax.mesh import Layout
from isojax.models import blocks
from isojax.models.init import init_params
from isojax.sampler.settings import executor
from isojax.trainer import settings
from tests.contract_util import (
    DENSE,
    HYBRID,
    run_config,
    swiglu_that_counts_rows,
    swiglu_that_sees_gradients,
)
from tests.test_contract_files import contract

CONFIG = run_config(
    DENSE,
    sampler=SamplerConfig(max_tokens=64, max_sequences=8, max_batch_tokens=256, bucket_sizes=1),
)


@functools.cache
def parameters(model=DENSE):
    return init_params(model, CONFIG.policy, CONFIG.mesh, CONFIG.mesh.mesh(), 0)


def self_check() -> Contract:
    """A fresh engine, scorer and trainer under the contract's self-check."""
    mesh = CONFIG.mesh.mesh()
    return startup.self_check(
        contract(),
        CONFIG,
        mesh=mesh,
        executor=executor(CONFIG, DENSE, mesh, parameters()),
        scorer=settings.scorer(CONFIG, DENSE, mesh),
        trainer=settings.trainer(CONFIG, DENSE, mesh),
        params=parameters(),
        weights_version=7,
    )


def test_the_canary_meets_every_kind_of_call_and_becomes_evidence():
    (found,) = self_check()["evidence"]
    assert found["check"] == "canary" and found["weights_version"] == 7 and found["mesh"] == "1x1"
    compared = found["compared"]
    assert found["differing"] == dict.fromkeys(("decode", "prefill", "mixed", "train_recompute"), 0)
    assert all(compared.values()), compared
    assert 2 * compared["train_recompute"] == sum(compared.values())  # every sampled token
    assert found["where"]["platform"] == "cpu"


def test_a_fault_refuses_to_start_and_is_named(monkeypatch):
    monkeypatch.setattr(blocks, "swiglu", swiglu_that_counts_rows)
    with pytest.raises(ContractError) as refused:
        self_check()
    text = str(refused.value)
    assert "decode differ" in text and "0x" in text
    assert "first difference: layer 0, op swiglu" in text and "decode and train_score part" in text


def test_a_fault_inside_the_gradient_refuses_to_start_and_is_named(monkeypatch):
    monkeypatch.setattr(blocks, "swiglu", swiglu_that_sees_gradients)
    with pytest.raises(ContractError) as refused:
        self_check()
    text = str(refused.value)
    assert "train_recompute differ" in text and "decode differ" not in text
    assert "layer 0, op swiglu" in text and "train_forward and train_score part" in text


@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param(HYBRID, "1x1", marks=pytest.mark.slow), (DENSE, "1x2+sequence")],
    ids=["hybrid", "dense"],
)
def test_bisection_finds_nothing_where_nothing_is_wrong(model, mesh):
    layout = Layout.parse(mesh)
    static = (model, CONFIG.policy, layout, layout.mesh())
    bisector = Bisector(*static, init_params(*static, 0))
    tokens = np.random.default_rng(0).integers(0, 96, 67)
    assert bisector.find(tokens, 62) is None


def test_bisection_names_the_op_where_ranks_share_rows(monkeypatch):
    layout = Layout.parse("1x1+context2")
    static = (DENSE, CONFIG.policy, layout, layout.mesh())
    monkeypatch.setattr(blocks, "swiglu", swiglu_that_counts_rows)
    tokens = np.random.default_rng(1).integers(0, 96, 66)
    found = Bisector(*static, init_params(*static, 0)).find(tokens, 64)
    assert (found.layer, found.op, found.case) == (0, "swiglu", "decode")
