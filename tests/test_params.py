"""The parameter tree: shapes and shardings fit the mesh, first values do not depend on it."""

import jax
import numpy as np
import pytest

from isojax.mesh import Layout
from isojax.models import params as parameters
from isojax.models.config import ModelConfig
from isojax.models.init import init_params
from isojax.numerics.policy import Policy
from tests.util import EXACT, assert_same_bits

HYBRID = ModelConfig(
    model_type="qwen3_next",
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    layer_types=("linear_attention", "full_attention"),
    mlp_layer_types=("sparse", "dense"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=4,
    intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


@pytest.mark.parametrize("policy", [Policy(), EXACT], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x4"])
def test_values_do_not_depend_on_the_mesh(mesh, policy):
    layout = Layout.parse(mesh)
    want = init_params(HYBRID, policy, Layout(), Layout().mesh(), seed=3)
    got = init_params(HYBRID, policy, layout, layout.mesh(), seed=3)
    assert_same_bits(got, want)


def test_arrays_are_what_the_table_says():
    layout = Layout(2, 4)
    mesh = layout.mesh()
    params = init_params(HYBRID, Policy(), layout, mesh, seed=0)
    for want, array in zip(
        jax.tree.leaves(parameters.shapes(HYBRID, Policy(), layout, mesh)),
        jax.tree.leaves(params),
        strict=True,
    ):
        assert (array.shape, array.dtype) == (want.shape, want.dtype)
        assert array.sharding.is_equivalent_to(want.sharding, array.ndim)
    # two key heads on four ranks: whole on each
    assert params["layers"][1]["attn"]["k"].sharding.is_fully_replicated
    # an expert is on one rank alone
    assert params["layers"][0]["moe"]["gate"].addressable_shards[0].data.shape == (2, 1, 32, 16)


def test_scales():
    params = init_params(HYBRID, EXACT, Layout(), Layout().mesh(), seed=1)
    delta, attention = params["layers"]
    for array, std in (
        (params["embed"], 1.0),
        (params["lm_head"], 32**-0.5),
        (attention["attn"]["q"], 32**-0.5),
        (attention["mlp"]["down"], (2 * 4 * 48) ** -0.5),
        (delta["moe"]["down"], (2 * 4 * 16) ** -0.5),
        (delta["gdn"]["conv_q"], 0.5),
    ):
        assert np.std(array) == pytest.approx(std, rel=0.1)
        assert abs(np.mean(array)) < 4 * std * array.size**-0.5
    assert (np.asarray(delta["input_norm"]) == 0).all()
    assert (np.asarray(delta["gdn"]["norm"]) == 1).all()
    rate = np.exp(delta["gdn"]["A_log"])
    step = np.log1p(np.exp(delta["gdn"]["dt_bias"]))
    assert 0.05 <= rate.min() < rate.max() <= 16.0
    assert 0.99e-3 <= step.min() < step.max() <= 1.01e-1
    assert delta["gdn"]["A_log"].dtype == delta["gdn"]["dt_bias"].dtype == np.float32


def test_a_seed_changes_every_weight():
    layout = Layout()
    one, two = (init_params(HYBRID, EXACT, layout, layout.mesh(), seed) for seed in (0, 1))
    table = parameters.parameters(HYBRID, EXACT, layout)
    for p, a, b in zip(*map(jax.tree.leaves, (table, one, two)), strict=True):
        same = (np.asarray(a) == np.asarray(b)).mean()
        assert same == 1.0 if p.init in ("zeros", "ones") else same < 0.01, p.name


def test_a_mesh_that_does_not_fit_is_refused_with_every_reason():
    with pytest.raises(ValueError) as error:
        parameters.parameters(HYBRID, Policy(), Layout(5, 3))
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "num_experts"):
        assert name in str(error.value)
    assert "intermediate_size (48)" not in str(error.value)


def test_count():
    params = init_params(HYBRID, Policy(), Layout(), Layout().mesh(), seed=0)
    assert parameters.count(HYBRID) == sum(a.size for a in jax.tree.leaves(params))
