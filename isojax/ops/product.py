"""A matrix product with a declared tree: the primitive that the linear ops share.

    out = sum over leaves, by neighbours, of ( sum over operand pairs i of a_i[:, leaf] b_i[leaf] )

Tree: every contraction is cut into `leaves` equal leaves; leaves combine by `pair_sum`, so a rank
that owns a run of leaves evaluates a subtree. Reference: in a leaf each pair is a `tree_dot`, and
pairs join in order. Mosaic: a leaf is one float32 sum in the tensor cores, up through the pairs.
Rounding: float32 sums of operands in the compute dtype, rounded once where `dtype` is narrower.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from isojax.numerics.policy import Policy
from isojax.numerics.trees import leaf_dots, pair_sum
from isojax.ops import kernel
from pallas_kernels.matmul import matmul

Operands = jax.Array | tuple[jax.Array, ...]


def product(
    a: Operands,
    b: Operands,
    policy: Policy,
    *,
    leaves: int = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """a [M, K] times b [K, N] -> [M, N] of `dtype`; or tuples of operands, whose products add up.

    transpose_a, transpose_b: the operand lies as [K, M], as [N, K].

    Raises:
      ValueError: if the leaves do not divide a contraction, or the kernels do not take the dtype.
    """
    if policy.evaluation == "mosaic":
        return kernel.call(
            matmul, a, b,
            leaves=leaves, transpose_a=transpose_a, transpose_b=transpose_b, out_dtype=dtype,
        )  # fmt: skip
    lhs, rhs = (a, b) if isinstance(a, tuple) else ((a,), (b,))
    parts = (
        leaf_dots(x.T if transpose_a else x, y.T if transpose_b else y, leaves, policy.dot_width)
        for x, y in zip(lhs, rhs, strict=True)
    )
    return pair_sum(functools.reduce(operator.add, parts)).astype(dtype)
