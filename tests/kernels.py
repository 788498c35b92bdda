"""What the kernel tests share: interpretation on a CPU, lowering for CUDA, errors, bits."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.ops import experts

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


@contextlib.contextmanager
def interpreted():
    """Run Mosaic GPU kernels in the GPU interpreter on the CPU.

    It has effects, which jax refuses in a forward that rematerialization may choose.
    """
    interpreter = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    with interpreter, mock.patch.object(experts._experts, "optimize_remat", False):
        yield


def lower_for_cuda(function, *arguments: tuple) -> str:
    """StableHLO of `function` for CUDA; arguments are (shape, dtype) pairs. Needs no GPU."""
    shapes = [jax.ShapeDtypeStruct(*argument) for argument in arguments]
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def calls_mosaic(function, *arguments: tuple) -> bool:
    """Whether `function` lowers for CUDA to a program with a Mosaic kernel in it."""
    return "mosaic_gpu" in lower_for_cuda(function, *arguments)


def normal(seed: int, *shape: int, dtype=BF16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def f64(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def error(out: jax.Array, reference: np.ndarray) -> float:
    """Norm of the difference over the norm; NaN never passes a comparison with it."""
    assert out.shape == reference.shape
    return float(np.linalg.norm(f64(out) - reference) / np.linalg.norm(reference))


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    integer = np.int16 if a.dtype == BF16 else np.int32
    return np.array_equal(np.asarray(a).view(integer), np.asarray(b).view(integer))


def vjp(function, arguments: list, cotangent: np.ndarray) -> list[np.ndarray]:
    """Gradients of `function` in float64."""
    with jax.enable_x64(True):
        _, pullback = jax.vjp(function, *(jnp.asarray(f64(a)) for a in arguments))
        return [np.asarray(g) for g in pullback(jnp.asarray(cotangent))]
