"""The experts' Hopper evaluation: rows sorted by expert, grouped products over as many as came."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from isojax.numerics.policy import Policy
from isojax.ops import kernel
from pallas_kernels.grouped_matmul import (
    ROW_ALIGNMENT,
    grouped_matmul,
    grouped_swiglu,
    grouped_swiglu_backward,
)
from pallas_kernels.grouped_matmul_dw import grouped_matmul_dw
from pallas_kernels.rows_routing import (
    ExpertRows,
    combine_slots,
    expert_rows,
    slot_dots,
    take_rows,
)

__all__ = ["backward", "combine", "forward", "slot_dots"]

combine = combine_slots

BLOCK = 64  # rows of an expert come in whole blocks of a contraction over them


class Kept(NamedTuple):
    """What the gradient keeps: where rows lie, and the float32 products with gate and up."""

    rows: ExpertRows
    products: jax.Array


def forward(policy: Policy, keep: bool, x, local, gate, up, down):
    """As `experts_reference.forward`."""
    del policy
    rows = expert_rows(local, gate.shape[0], BLOCK if keep else ROW_ALIGNMENT)
    groups = rows.starts, rows.sizes
    out = grouped_swiglu(take_rows(x, rows.token), gate, up, *groups, keep=keep)
    hidden, kept = (out[0], Kept(rows, out[1])) if keep else (out, None)
    return grouped_matmul(hidden, down, *groups), rows.place.reshape(-1), kept


@partial(jax.jit, static_argnums=0)
def backward(policy: Policy, kept: Kept, x, local, share, dout, gate, up, down):
    """As `experts_reference.backward`."""
    del policy, local
    rows, products = kept
    groups = rows.starts, rows.sizes
    at = jnp.zeros(rows.token.size, jnp.float32)
    at = at.at[rows.place.reshape(-1)].set(share.reshape(-1), mode="drop")
    tokens = take_rows(x, rows.token)
    dy = take_rows(dout, rows.token, at)
    dgate, dup, hidden = grouped_swiglu_backward(products, down, dy, *groups)
    dx = grouped_matmul((dgate, dup), (gate, up), *groups, transpose_w=True)
    pairs = (tokens, dgate), (tokens, dup), (hidden, dy)
    weights = tuple(kernel.call(grouped_matmul_dw, *pair, *groups) for pair in pairs)
    return dx, rows.place.reshape(-1), weights
