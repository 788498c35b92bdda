"""AdamW equals optax's; its norm, master weights and parameters do not depend on the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from isojax.mesh import Layout
from isojax.numerics.policy import Policy
from isojax.trainer import optimizer
from isojax.trainer.optimizer import AdamW, Schedule
from isojax.trainer.sharding import place, reduce_gradient

POLICY = Policy()
SCHEDULE = Schedule(learning_rate=1e-2, warmup_steps=2)
MESHES = ["1x1", "2x1", "1x2", "2x2", "8x1", "4x2", "1x8", "2x4"]

SHAPES = {
    "embed": (48, 32),
    "norm": (24,),
    "layers": (
        {
            "q": (2, 32, 16),
            "norm": (2, 32),
            "A_log": (2, 8),
            "experts": (2, 16, 8, 24),
            "odd": (2, 5, 3),
        },
    ),
}
SPECS = {
    "embed": P("model", None),
    "norm": P(),
    "layers": (
        {
            "q": P(None, None, "model"),
            "norm": P(),
            "A_log": P(None, "model"),
            "experts": P(None, ("data", "model"), None, None),
            "odd": P(),
        },
    ),
}


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(i, int) for i in x)


def draw(seed: int, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), dtype), SHAPES, is_leaf=is_shape)


def placements_of(params, specs):
    return jax.tree.map(lambda p, spec: place(p.shape, spec, POLICY), params, specs)


def run(mesh: str, adamw: AdamW, steps: int, dtype=jnp.float32):
    """Parameters, master weights, state and norms after `steps` on `mesh`, as global arrays."""
    layout = Layout.parse(mesh)
    params = draw(0, dtype)
    at = placements_of(params, SPECS)
    state = jax.tree.map(lambda p: p.state, optimizer.like_state(adamw, at))
    blocks = jax.tree.map(lambda p: p.state, at)

    def body(params, gradients):
        master, opt = optimizer.init(adamw, params, at, layout)
        norms = []
        for i, g in enumerate(gradients):
            master, opt, params, norm = optimizer.update(
                adamw,
                g,
                master,
                opt,
                params,
                SCHEDULE.rate(i),
                placements=at,
                policy=POLICY,
                layout=layout,
            )
            norms.append(norm)
        return params, master, opt, jnp.stack(norms)

    mapped = jax.shard_map(
        body,
        mesh=layout.mesh(),
        in_specs=(SPECS, [blocks] * steps),
        out_specs=(SPECS, blocks, state, P()),
        check_vma=False,
    )
    return jax.jit(mapped)(params, [draw(10 + i) for i in range(steps)])


def test_update_is_optax_adamw():
    adamw = AdamW(weight_decay=0.1, max_grad_norm=5.0)
    params, _, _, norms = run("1x1", adamw, 3)
    reference = optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.adamw(
            lambda step: 1e-2 * jnp.minimum((step + 1) / 2, 1),
            weight_decay=0.1,
            mask={
                "embed": True,
                "norm": False,
                "layers": (
                    {"q": True, "norm": False, "A_log": False, "experts": True, "odd": True},
                ),
            },
        ),
    )
    want = draw(0)
    state = reference.init(want)
    for i in range(3):
        gradient = draw(10 + i)
        np.testing.assert_allclose(norms[i], optax.tree.norm(gradient), rtol=1e-6)
        changes, state = reference.update(gradient, state, want)
        want = optax.apply_updates(want, changes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), params, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_mesh_gives_the_same_bits(dtype):
    adamw = AdamW(max_grad_norm=1.0)
    bits = lambda x: np.asarray(x).view(np.int16 if x.dtype == jnp.bfloat16 else np.int32)  # noqa: E731
    base = jax.tree.map(bits, run(MESHES[0], adamw, 2, dtype))
    assert base[0]["embed"].dtype == (np.int16 if dtype == jnp.bfloat16 else np.int32)
    for mesh in MESHES[1:]:
        jax.tree.map(
            np.testing.assert_array_equal, base, jax.tree.map(bits, run(mesh, adamw, 2, dtype))
        )


def test_a_gradient_that_is_not_finite_changes_nothing():
    layout = Layout()
    params, adamw = {"w": jnp.ones((8, 8))}, AdamW()
    at = placements_of(params, {"w": P()})
    master, state = optimizer.init(adamw, params, at, layout)
    gradient = {"w": jnp.ones((8, 8)).at[3, 3].set(jnp.nan)}
    new_master, new_state, new_params, norm = optimizer.update(
        adamw,
        gradient,
        master,
        state,
        params,
        jnp.float32(0.1),
        placements=at,
        policy=POLICY,
        layout=layout,
    )
    assert not np.isfinite(norm)
    same = lambda a, b: np.testing.assert_array_equal(a, b)  # noqa: E731
    jax.tree.map(same, (master, state, params), (new_master, new_state, new_params))


def test_the_tree_is_that_of_the_finest_cut():
    """An axis that one mesh leaves whole, having more ranks than heads, is summed as if cut."""
    value = jnp.asarray(np.random.default_rng(4).normal(size=(16, 24)), jnp.float32)
    norms = []
    for mesh, spec in (("1x1", P(None, "model")), ("2x2", P(None, "model")), ("2x4", P())):
        layout = Layout.parse(mesh)
        at = place(value.shape, spec, POLICY, finest=P(None, "model"))

        def norm(block, at=at, layout=layout):
            return optimizer.square_sum(block, placement=at, policy=POLICY, layout=layout)

        mapped = jax.shard_map(
            norm, mesh=layout.mesh(), in_specs=at.state, out_specs=P(), check_vma=False
        )
        norms.append(np.asarray(jax.jit(mapped)(value)).view(np.int32))
    assert len(set(map(int, norms))) == 1
    np.testing.assert_allclose(norms[0].view(np.float32), (value * value).sum(), rtol=1e-6)


def test_warm_up():
    rates = [Schedule(1.0, warmup_steps=4).rate(i) for i in range(6)]
    np.testing.assert_array_equal(rates, [0.25, 0.5, 0.75, 1, 1, 1])
    assert Schedule(0.5).rate(0) == 0.5
    assert rates[0].dtype == np.float32


def test_placement_takes_the_longest_whole_axis():
    assert place((2, 16, 64), P(None, None, "model"), POLICY).axis == 1
    assert place((8, 16, 64), P(), POLICY).axis == 2
    assert place((3, 5), P(), POLICY).axis is None
    owned = place((2, 16, 8), P(None, ("data", "model")), POLICY)
    assert owned.owned and owned.axis is None and owned.state == P(None, ("data", "model"), None)


@pytest.mark.parametrize("shape", [(16, 24), (5, 3)])
def test_reduction_over_data_is_the_leaf_tree(shape):
    """Partials of 8 leaves, held by 1 to 8 ranks as subtrees, finish to the same bits."""
    from isojax.numerics.trees import pair_sum

    leaves = jnp.asarray(np.random.default_rng(3).normal(size=(8, *shape)), jnp.float32)
    want = np.asarray(pair_sum(leaves))
    at = place(shape, P(), POLICY)
    for ranks in (1, 2, 4, 8):
        layout = Layout(data=ranks)

        def body(mine, layout=layout):
            return reduce_gradient(pair_sum(mine), placement=at, layout=layout)

        mapped = jax.shard_map(
            body, mesh=layout.mesh(), in_specs=P("data"), out_specs=at.state, check_vma=False
        )
        got = np.asarray(jax.jit(mapped)(leaves))
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
