"""Process-wide XLA flags without which equal expressions do not give equal bits.

- ``--xla_allow_excess_precision=false``: XLA must not drop a float32 -> bfloat16 -> float32 round
  trip; every rounding point of an op is meant.
- ``--xla_cpu_max_isa=AVX``: LLVM contracts ``a * b + c`` to a fused multiply-add whenever the two
  land in one XLA fusion, and fusion follows the shapes. AVX has no such instruction, so on a CPU
  every product and every sum is rounded by itself, in every program. It costs no speed there.

XLA reads its flags when a backend starts, so they are set on import of isojax.
"""

import os

REQUIRED_XLA_FLAGS: dict[str, str] = {
    "--xla_allow_excess_precision": "false",
    "--xla_cpu_max_isa": "AVX",
}


def parse_xla_flags(text: str) -> dict[str, str]:
    """``--a=b --c`` as ``{"--a": "b", "--c": ""}``; a later flag wins, as in XLA."""
    return {key: value for key, _, value in (flag.partition("=") for flag in text.split())}


def configure() -> None:
    """Put the required flags into XLA_FLAGS.

    Raises:
      RuntimeError: if XLA_FLAGS sets one of them otherwise, or a jax backend is already running
        without them.
    """
    flags = parse_xla_flags(os.environ.get("XLA_FLAGS", ""))
    for key, value in REQUIRED_XLA_FLAGS.items():
        if flags.get(key, value) != value:
            raise RuntimeError(
                f"XLA_FLAGS sets {key}={flags[key]}, but bitwise equality needs {key}={value}: "
                "remove it from XLA_FLAGS"
            )
    missing = [f"{k}={v}" for k, v in REQUIRED_XLA_FLAGS.items() if k not in flags]
    if not missing:
        return
    from jax._src import xla_bridge  # the public API has no question "is a backend running?"

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "a jax backend is already running without " + " ".join(missing) + ": "
            "import isojax before the first jax computation, or set XLA_FLAGS yourself"
        )
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()
