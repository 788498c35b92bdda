"""The experts' Hopper evaluation: rows sorted by expert, grouped products over as many as came."""

from functools import partial

import jax
import jax.numpy as jnp

from isojax.numerics.policy import Policy
from isojax.ops import kernel
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu, grouped_swiglu_backward
from pallas_kernels.grouped_matmul_dw import grouped_matmul_dw
from pallas_kernels.rows_routing import (
    ExpertRows,
    combine_slots,
    expert_rows,
    expert_rows_capacity,
    slot_dots,
)

__all__ = ["backward", "combine", "forward", "slot_dots"]

combine = combine_slots


def _rows(local: jax.Array, experts: int) -> ExpertRows:
    return expert_rows(local, experts, expert_rows_capacity(local.size, experts))


def _take(x: jax.Array, rows: ExpertRows) -> jax.Array:
    """Rows of tokens x [tokens, ...] where their experts read them, zero where none is."""
    return x.at[rows.token].get(mode="fill", fill_value=0)


def forward(policy: Policy, x, local, gate, up, down) -> tuple[jax.Array, jax.Array]:
    """As `experts_reference.forward`."""
    del policy
    rows = _rows(local, gate.shape[0])
    groups = rows.starts, rows.sizes
    hidden = grouped_swiglu(_take(x, rows), gate, up, *groups)
    return grouped_matmul(hidden, down, *groups), rows.place.reshape(-1)


@partial(jax.jit, static_argnums=0)
def backward(policy: Policy, x, local, share, dout, gate, up, down):
    """As `experts_reference.backward`."""
    del policy
    rows = _rows(local, gate.shape[0])
    groups = rows.starts, rows.sizes
    at = jnp.zeros(rows.token.size, jnp.float32)
    at = at.at[rows.place.reshape(-1)].set(share.reshape(-1), mode="drop")
    tokens = _take(x, rows)
    dy = (_take(dout, rows).astype(jnp.float32) * at[:, None]).astype(x.dtype)
    dgate, dup, hidden = grouped_swiglu_backward(tokens, gate, up, down, dy, *groups)
    dx = grouped_matmul((dgate, dup), (gate, up), *groups, transpose_w=True)
    pairs = (tokens, dgate), (tokens, dup), (hidden, dy)
    weights = tuple(kernel.call(grouped_matmul_dw, *pair, *groups) for pair in pairs)
    return dx, rows.place.reshape(-1), weights
