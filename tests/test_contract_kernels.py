"""A Mosaic kernel's digest ignores where its source lies, and sees its arithmetic."""

import importlib.util

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.contract.build import build
from isojax.contract.diff import diff
from isojax.contract.stablehlo import Program
from isojax.models import blocks
from tests.contract_util import DENSE, run_config

KERNEL = """
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def scale(x):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(), grid_names=()
    )(x)
"""


def program(folder, text):
    folder.mkdir()
    path = folder / "scale_kernel.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("scale_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    lowered = jax.jit(lambda x: module.scale(x)).trace(x).lower(lowering_platforms=("cuda",))
    return Program(lowered), lowered.as_text()


def test_folder_and_blank_lines_do_not_count_but_arithmetic_does(tmp_path):
    here, text = program(tmp_path / "here", KERNEL)
    lower_down = KERNEL.replace("\ndef scale", "\n\n\n\n# x\ndef scale")
    there, moved = program(tmp_path / "there", lower_down)
    assert text != moved  # the raw text holds the source's path and lines
    assert here.digest == there.digest
    (kernel,), (same,) = here.kernels, there.kernels
    assert kernel == same
    assert any("mulf f32" in item for item in kernel.arithmetic)
    other, _ = program(tmp_path / "other", KERNEL.replace("* 2.0", "+ 2.0"))
    assert other.kernels[0].module != kernel.module
    assert other.kernels[0].arithmetic != kernel.arithmetic
    constant, _ = program(tmp_path / "constant", KERNEL.replace("* 2.0", "* 3.0"))
    assert constant.digest != here.digest


def test_copies_of_an_inner_function_do_not_count():
    """jax lowers a function once or again, depending on what its trace caches still hold."""

    def helper(factor=2):
        def scale(x):
            return x * factor + 1

        return jax.jit(scale)

    def called(first, second, third):
        def iso_chain(x):
            return third(second(first(x)) + x)

        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        return Program(jax.jit(jax.jit(iso_chain)).lower(x))

    one, other = helper(), helper(3)
    shared, copied = called(one, one, one), called(one, helper(), helper())
    assert count(shared) < count(copied)
    assert shared.expanded("iso_chain") == copied.expanded("iso_chain")
    assert shared["iso_chain"].digest == copied["iso_chain"].digest
    assert shared.digest == copied.digest
    for program in (called(one, one, other), called(other, one, one), called(one, helper(), other)):
        assert program.expanded("iso_chain") != shared.expanded("iso_chain")
        assert program.digest != shared.digest


def count(program):
    return program.module.operation.get_asm().count("func.func")


def swiglu_kernel(tile, scale=1.0):
    """An op `swiglu` whose forward is a Mosaic kernel that walks the rows in tiles."""

    @jax.custom_vjp
    def run(gate, up):
        def body(gate_ref, up_ref, out_ref):
            rows = pl.ds(lax.axis_index("i") * tile, tile)
            a, b = (ref[rows].astype(jnp.float32) for ref in (gate_ref, up_ref))
            out_ref[rows] = (a * b * scale).astype(out_ref.dtype)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
            grid=(gate.shape[0] // tile,),
            grid_names=("i",),
            kernel_name="swiglu_rows",
        )(gate, up)

    run.defvjp(lambda a, b: (run(a, b), (a, b)), lambda saved, d: (d * saved[1], d * saved[0]))

    def iso_swiglu(gate, up, *, policy):
        return run(gate, up)

    return jax.jit(iso_swiglu, static_argnames="policy")


def test_kernels_are_in_the_numerical_identity_and_their_tiles_are_not(monkeypatch):
    def built(op):
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "swiglu", op)
            return build(run_config(DENSE), platform="cuda", meshes=())

    plain, kernel = built(blocks.swiglu), built(swiglu_kernel(tile=64))
    entry = kernel["ops"]["swiglu"]
    assert entry["kernels"] == ["swiglu_rows"] and "arith.mulf f32 contract" in entry["arithmetic"]
    assert kernel["cases"]["decode"]["ops"]["swiglu"]["rows_erased"] is False
    said = [str(change) for change in diff(plain, kernel)]
    (named,) = (line for line in said if "op swiglu: other kernels: with swiglu_rows" in line)
    assert "decode" in named and "train_forward" in named
    assert built(swiglu_kernel(tile=128)).numerical == kernel.numerical
    assert built(swiglu_kernel(tile=64, scale=3.0)).numerical != kernel.numerical
    assert kernel["environment"]["device"] == "sm_90"
