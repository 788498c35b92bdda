"""Tensor-core products of the attention kernels, and the shared-memory layout that they need."""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

# Of a thread, for two warpgroups that multiply and one that feeds them. In all no more than what
# 384 threads start with, 168 each; with more the second warpgroup would wait for its share forever.
COMPUTE_REGISTERS, FEED_REGISTERS = 232, 40
MOST_REGISTERS, LEAST_REGISTERS = 240, 24  # the same where feeding is simple


def operand(shape: tuple[int, ...], dtype: jnp.dtype = jnp.bfloat16):
    """Shared memory [..., rows, columns] in the tiled and swizzled layout that wgmma reads."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def product(a, b, *, then: Callable[[], None] = lambda: None) -> jax.Array:
    """a @ b in float32; `then` runs when the product is issued, before it is awaited."""

    def issue(acc):
        plgpu.wgmma(acc, a, b)
        then()
        return acc[...]

    return pl.run_scoped(issue, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def interpreted() -> bool:
    """Whether kernels are traced for the interpreter."""
    from jax._src import config  # nothing public tells

    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def accumulate(acc: jax.Array, a, b, *, then: Callable[[], None] = lambda: None) -> jax.Array:
    """acc + a @ b, summed in the tensor core; a may be an array in registers.

    The interpreter of Mosaic GPU kernels knows neither an initialised accumulator nor an operand in
    registers; there the product is plain arithmetic.
    """
    if interpreted():
        then()
        return acc + jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def issue(ref):
        plgpu.wgmma(ref, a, b)
        then()

    return pl.run_state(issue)(plgpu.ACC.init(acc))


def launch(body: Callable, name: str, **kwargs):
    """`plgpu.kernel` as the attention kernels are compiled."""
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name=name,
        **kwargs,
    )
