"""Build an array on a mesh shard by shard, so that the host holds one shard at a time."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isojax.models.params import Parameter

# read(at, rest) -> the block at leading indices `at`, cut to the slices `rest` of the other axes
Read = Callable[[tuple[int, ...], tuple[slice, ...]], np.ndarray]


def place(
    parameter: Parameter, mesh: Mesh, leading: int, read: Read, pool: ThreadPoolExecutor
) -> jax.Array:
    """The parameter's array, each shard made of blocks along its `leading` first axes.

    Blocks are read by the threads of `pool` and cast to the parameter's dtype.
    """

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(parameter.shape)
        ranges = [range(*s.indices(side)) for s, side in zip(index, parameter.shape, strict=True)]
        values = np.empty([len(r) for r in ranges], parameter.dtype)
        rest = tuple(slice(r.start, r.stop) for r in ranges[leading:])

        def fill(at: tuple[int, ...]) -> None:
            local = tuple(i - r.start for i, r in zip(at, ranges, strict=False))
            values[local] = read(at, rest)

        list(pool.map(fill, itertools.product(*ranges[:leading])))
        return values

    sharding = NamedSharding(mesh, parameter.spec)
    return jax.make_array_from_callback(parameter.shape, sharding, shard)
