"""What of the world around the program can move a bit: versions, flags, the device."""

import os
import platform as host
from importlib import metadata
from typing import Any

import jax

from isojax.contract.canonical import ContractError
from isojax.runtime import parse_xla_flags

# flags that only name files, print, or split a CPU into devices
_NEUTRAL_FLAGS = (
    "--xla_force_host_platform_device_count",
    "--xla_dump",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)
# those that change what is traced, then those that change what XLA makes of it
_JAX_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_compiler_enable_remat_pass",
)
# under these there is no program that a contract could be about
_REFUSED_OPTIONS = ("jax_enable_x64", "jax_disable_jit")
_PACKAGES = ("jax", "jaxlib", "optax")
DEFAULT_DEVICE = {"cuda": "sm_90"}


def required(platform: str, device: str | None = None) -> dict[str, Any]:
    """The fields that programs of equal bits must share, known before there is a device.

    device: compute capability such as "sm_90", or a CPU's architecture; by default Hopper, or this
    CPU.

    Raises:
      ContractError: for a device of another platform, and for a jax option that no run may set.
    """
    for option in _REFUSED_OPTIONS:
        if _option(option):
            raise ContractError(f"{option} is set: the forward is written for float32 and for jit")
    if platform == "cpu" and device not in (None, host.machine()):
        raise ContractError(f"a CPU contract is for this machine ({host.machine()}), not {device}")
    if device is None:
        device = host.machine() if platform == "cpu" else DEFAULT_DEVICE[platform]
    if platform == "cuda" and not device.startswith("sm_"):
        raise ContractError(f"a CUDA device is written like sm_90, not {device!r}")
    other = "--xla_gpu" if platform == "cpu" else "--xla_cpu"
    flags = {
        name: value
        for name, value in parse_xla_flags(os.environ.get("XLA_FLAGS", "")).items()
        if not name.startswith((*_NEUTRAL_FLAGS, other))
    }
    return {
        "platform": platform,
        "device": device,
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "xla_flags": flags,
        "jax_options": {name: _option(name) for name in _JAX_OPTIONS},
    }


def _option(name: str) -> Any:
    value = jax.config.values[name]
    return value if isinstance(value, (bool, str)) or value is None else str(value)


def observed(devices: list[jax.Device] | None = None) -> dict[str, Any]:
    """The devices of the run, with this process's kind and driver; starts a backend."""
    devices = jax.devices() if devices is None else devices
    first = next(device for device in devices if device.process_index == jax.process_index())
    version = getattr(first.client, "platform_version", "")
    return {
        "platform": "cuda" if first.platform == "gpu" else first.platform,
        "device": _capability(first),
        "device_kind": first.device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "driver": _driver(),
        "runtime": " ".join(version.split()),
    }


def _capability(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return "sm_" + str(capability).replace(".", "") if capability else host.machine()


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, if there is one."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
