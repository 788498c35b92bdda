"""The plan of a device's memory, against the arrays of a run."""

import json

import jax
import pytest

from isojax import cli
from isojax.config_io import to_toml
from isojax.memory import plan
from isojax.mesh import Layout
from isojax.models.init import init_params
from isojax.sampler.settings import executor
from isojax.trainer import settings
from tests.contract_util import run_config
from tests.test_meshes import MODELS, ROUNDED


def held(tree) -> int:
    """Bytes on the first device."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == first)


@pytest.mark.parametrize("mesh", ["1x1", "4x2", "2x2+context2"])
def test_the_plan_is_what_a_run_holds(mesh):
    layout = Layout.parse(mesh)
    config = run_config(MODELS["hybrid_moe"], mesh=layout, policy=ROUNDED)
    devices = layout.mesh()
    parts = plan(config)
    trainer = settings.trainer(config, config.model, devices)
    params = init_params(config.model, config.policy, layout, devices, 0)
    state = trainer.init(params)
    gradients, _ = trainer.zeros()
    assert parts["always"]["weights"] == held(params)
    assert parts["always"]["master weights"] == held(state.master)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert parts["always"]["moments"] == held(moments)
    assert parts["training call"]["gradients, summed over calls"] == held(gradients)
    pools = executor(config, config.model, devices, params).cache
    assert parts["rollout"]["keys and values"] == held((pools.keys, pools.values))
    assert parts["rollout"]["states of sequences"] == held((pools.conv, pools.delta))


def test_the_command_prints_it(tmp_path, capsys):
    config = run_config(MODELS["dense"], policy=ROUNDED)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert cli.main(["plan", "--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan(config)
    assert cli.main(["plan", "--config", str(path)]) == 0
    assert "training call, all told" in capsys.readouterr().out
    assert cli.main(["plan", "--config", str(path), "--mesh", "3x1"]) == 2
    assert "3" in capsys.readouterr().err
