"""Random parameters: the same values on every mesh."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.params import Parameter, Params, parameters
from isojax.models.placement import place
from isojax.numerics.policy import Policy


def init_params(
    config: ModelConfig, policy: Policy, layout: Layout, mesh: Mesh, seed: int
) -> Params:
    """Random parameters on the mesh; each is a function of (seed, its name, index) alone.

    The matrix of a layer, or of one expert, is a block with its own counter-based generator
    (Philox); a device asks for the blocks of its shards. seed is within [0, 2^64).

    Weights are normal with standard deviation inputs^-1/2, less in maps into the residual. Gated
    DeltaNet starts as its authors' code does (Yang, Kautz and Hatamizadeh 2024): decay rates A
    uniform in (0.05, 16), time steps softplus(dt_bias) log-uniform in (0.001, 0.1).
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:

        def build(parameter: Parameter) -> jax.Array:
            # everything before the last two axes of a weight, the last one of a vector, is stacked
            leading = 0 if parameter.position is None else max(1, len(parameter.shape) - 2)

            def read(at: tuple[int, ...], rest: tuple[slice, ...]) -> np.ndarray:
                return _block(parameter, seed, at)[rest]

            return place(parameter, mesh, leading, read, pool)

        return jax.tree.map(build, parameters(config, policy, layout))


def _block(parameter: Parameter, seed: int, at: tuple[int, ...]) -> np.ndarray:
    """The block at leading indices `at`, float32."""
    number = int(np.ravel_multi_index(at, parameter.shape[: len(at)])) if at else 0
    key = np.array([seed, zlib.crc32(parameter.name.encode()) << 32 | number], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key))
    shape = parameter.shape[len(at) :]
    match parameter.init:
        case "zeros":
            return np.zeros(shape, np.float32)
        case "ones":
            return np.ones(shape, np.float32)
        case "normal":
            values = random.standard_normal(shape, np.float32)
            values *= np.float32(parameter.std)
            return values
        case "A_log":
            return np.log(random.uniform(0.05, 16.0, shape)).astype(np.float32)
        case "dt_bias":
            step = np.exp(random.uniform(np.log(1e-3), np.log(1e-1), shape))
            inverse_softplus = step + np.log(-np.expm1(-step))
            return inverse_softplus.astype(np.float32)
