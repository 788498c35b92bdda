"""Meshes are tested on virtual CPU devices; the flag must stand before jax starts a backend."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()


import isojax  # noqa: E402, F401
