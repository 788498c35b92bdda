"""A Mosaic kernel's digest ignores where its source lies, and sees its arithmetic."""

import importlib.util

import jax
import jax.numpy as jnp

from isojax.contract.stablehlo import Program

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
