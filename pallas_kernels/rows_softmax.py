"""Softmax of short rows, as a router needs it: over all experts, or over the few chosen ones."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_core import leaf_tree
from pallas_kernels.rows import row_kernel, spread

_LINE = 128  # rows of one step: one a thread


def softmax(z: jax.Array) -> jax.Array:
    """Softmax over the last axis: z [R, E] float32, E a multiple of 32 -> [R, E] float32."""

    def function(z):
        e = jnp.exp(z - spread(jnp.max(z, axis=1), z))
        return (e / spread(jnp.sum(e, axis=1), z),)

    return row_kernel(function, (z,), (), [(z.shape[1], jnp.float32)], "softmax", elements=16)[0]


def softmax_backward(p: jax.Array, dp: jax.Array) -> jax.Array:
    """Of `softmax` with result p: p (dp - sum(dp p)); all [R, E] float32."""

    def function(p, dp):
        return (p * (dp - spread(jnp.sum(dp * p, axis=1), p)),)

    outs = [(p.shape[1], jnp.float32)]
    return row_kernel(function, (p, dp), (), outs, "softmax_backward", elements=16)[0]


def _narrow(function, operands, name):
    """Apply `function` to lists of the columns of [R, k] arrays; a row a thread."""
    rows, k = operands[0].shape
    padded = rows + -rows % _LINE
    operands = [jnp.pad(x.T, ((0, 0), (0, padded - rows))) for x in operands]

    def body(*refs):
        *in_refs, out = refs
        span = pl.ds(lax.axis_index("block") * _LINE, _LINE)
        columns = [[ref[i, span] for i in range(k)] for ref in in_refs]
        for i, value in enumerate(function(*columns)):
            out[i, span] = value

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((k, padded), jnp.float32),
        grid=(padded // _LINE,),
        grid_names=("block",),
        kernel_name=name,
    )(*operands)
    return out[:, :rows].T


def _sum(columns):
    """By neighbours, extended with zeros to a power of two."""
    size = 1 << (len(columns) - 1).bit_length()
    index = iter([*columns, *[jnp.zeros_like(columns[0])] * (size - len(columns))])
    return leaf_tree(lambda: next(index), size)


def softmax_chosen(z: jax.Array) -> jax.Array:
    """Softmax over the last axis of z [R, k] float32, k small -> [R, k] float32."""

    def function(z):
        top = functools.reduce(jnp.maximum, z)
        e = [jnp.exp(x - top) for x in z]
        total = _sum(e)
        return [x / total for x in e]

    return _narrow(function, (z,), "softmax_chosen")


def softmax_chosen_backward(p: jax.Array, dp: jax.Array) -> jax.Array:
    """Of `softmax_chosen` with result p: p (dp - sum(dp p)); all [R, k] float32."""

    def function(p, dp):
        inner = _sum([a * b for a, b in zip(p, dp, strict=True)])
        return [a * (b - inner) for a, b in zip(p, dp, strict=True)]

    return _narrow(function, (p, dp), "softmax_chosen_backward")
