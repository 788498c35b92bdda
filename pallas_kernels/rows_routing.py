"""Between tokens and experts: weighted results combine in routing order, gradients travel back."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_VECTOR = 8


def _slab(width: int) -> int:
    size = next((128 * v for v in (_VECTOR, 4, 2, 1) if width % (128 * v) == 0), None)
    if size is None:
        raise ValueError(f"a row of {width} elements is not a multiple of 128")
    return size


def combine_slots(y: jax.Array, place: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sum of a token's results over its routing slots, by halving, in float32; rounded once.

    Args:
      y: [R, H] bfloat16 or float32, rows where they came to lie; H a multiple of 128.
      place: [T, k] int32, row of y of every slot; k a power of two.
      weights: [T, k] float32; without it the results are added as they are.

    Returns:
      [T, H] bfloat16.

    Raises:
      ValueError: if H is not a multiple of 128 or k not a power of two.
    """
    tokens, slots = place.shape
    if slots & (slots - 1):
        raise ValueError(f"the number of slots must be a power of two, not {slots}")
    slab = _slab(y.shape[1])

    def body(y_gmem, place_gmem, *refs):
        *weights_gmem, out = refs
        token, span = lax.axis_index("token"), pl.ds(lax.axis_index("slab") * slab, slab)
        terms = [y_gmem[place_gmem[token, k], span].astype(jnp.float32) for k in range(slots)]
        if weights_gmem:
            terms = [term * weights_gmem[0][token, k] for k, term in enumerate(terms)]
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
        out[token, span] = terms[0].astype(jnp.bfloat16)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, y.shape[1]), jnp.bfloat16),
        grid=(tokens, y.shape[1] // slab),
        grid_names=("token", "slab"),
        kernel_name="combine_slots",
    )(y, place, *(() if weights is None else (weights,)))


def combine_slots_backward(
    y: jax.Array, place: jax.Array, weights: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of weighted `combine_slots`.

    Args:
      y, place, weights: as there; no two slots have one place.
      dout: [T, H] bfloat16.

    Returns:
      (dy [R, H] bfloat16, rows of no slot left as they were allocated; dweights [T, k] float32).

    Raises:
      ValueError: if H is not a multiple of 128.
    """
    tokens, slots = place.shape
    width = y.shape[1]
    _slab(width)

    def body(y_gmem, place_gmem, weights_gmem, dout_gmem, dy, dweights):
        token, slot = lax.axis_index("token"), lax.axis_index("slot")
        row = place_gmem[token, slot]
        d = dout_gmem[token].astype(jnp.float32)
        dweights[token, slot] = jnp.sum(d * y_gmem[row].astype(jnp.float32))
        dy[row] = (d * weights_gmem[token, slot]).astype(jnp.bfloat16)

    return tuple(
        plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct(y.shape, jnp.bfloat16),
                jax.ShapeDtypeStruct((tokens, slots), jnp.float32),
            ],
            grid=(tokens, slots),
            grid_names=("token", "slot"),
            kernel_name="combine_slots_backward",
        )(y, place, weights, dout)
    )
