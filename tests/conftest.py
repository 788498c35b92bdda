"""Eight virtual CPU devices for every test, so that meshes can be compared."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import isojax  # noqa: E402, F401  (puts its own flags beside these before jax starts)
