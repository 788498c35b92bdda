"""Flags that must stand before jax starts a backend.

Meshes are tested on virtual CPU devices. Tests compile much and run little, so LLVM optimises
less; without fast-math that moves no bit.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=1"
).strip()


import isojax  # noqa: E402, F401
