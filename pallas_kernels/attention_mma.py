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


def _interpreted() -> bool:
    """Whether kernels are traced for the interpreter."""
    from jax._src import config  # nothing public tells

    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def accumulate(acc: jax.Array, a, b, *, then: Callable[[], None] = lambda: None) -> jax.Array:
    """acc + a @ b, summed in the tensor core; a may be an array in registers.

    The interpreter of Mosaic GPU kernels knows neither an initialised accumulator nor an operand in
    registers; there the product is plain arithmetic.
    """
    if _interpreted():
        then()
        return acc + jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def issue(ref):
        plgpu.wgmma(ref, a, b)
        then()

    return pl.run_state(issue)(plgpu.ACC.init(acc))


def products(one, other, then: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """then(a @ b) of one pair (a, b) while the other's product is under way, and that product."""
    if _interpreted():
        plain = lambda a, b: jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)  # noqa: E731
        return then(plain(*one)), plain(*other)

    def issue(first, second):
        plgpu.wgmma(first, *one)
        plgpu.wgmma(second, *other)
        result = then(plgpu.wgmma_accumulator_load(first, wait_n=1))
        return result, plgpu.wgmma_accumulator_load(second)

    accumulators = (plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in (one, other))
    return pl.run_scoped(issue, *accumulators)


def accumulate_both(sums, a, b, then: Callable[[], jax.Array], d):
    """(sums[0] + a @ b, sums[1] + then() @ d); `then` runs while the first is under way."""
    if _interpreted():
        x = accumulate(sums[0], a, b)
        return x, accumulate(sums[1], then(), d)

    def issue(accumulators):
        plgpu.wgmma(accumulators[0], a, b)
        plgpu.wgmma(accumulators[1], then(), d)

    return pl.run_state(issue)(tuple(plgpu.ACC.init(x) for x in sums))
