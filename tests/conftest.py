"""Flags that must stand before jax starts a backend.

Meshes are tested on virtual CPU devices. Tests compile much and run little, so LLVM optimises
less; without fast-math that moves no bit. What one test compiled, others and later runs find again
under .jax_cache, by the digest of the program.
"""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=1"
).strip()
CACHE = Path(__file__).parents[1] / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import isojax  # noqa: E402, F401

# The files that take longest, longest first, so that none is left over when the others are done.
LONG = (
    "test_meshes", "test_loop", "test_invariance", "test_contract_selfcheck",
    "test_contract_committed", "test_cli", "test_attention_kernels", "test_trainer", "test_golden",
    "test_contract_build", "test_gated_delta_mosaic", "test_sampler_model", "test_matmul_kernels",
    "test_row_ops_mosaic", "test_matrix_ops_mosaic", "test_contract_kernels",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
