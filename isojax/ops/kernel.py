"""How an op calls a Pallas kernel: as an inner jit, with errors that name the way out."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from isojax.numerics.policy import Policy


@functools.cache
def _compiled(kernel: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(kernel, **dict(options)))


def call(kernel: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """kernel(*arrays, **options), the options static and hashable.

    Raises:
      ValueError: for shapes that the kernel does not take.
    """
    try:
        return _compiled(kernel, tuple(options.items()))(*arrays)
    except ValueError as error:
        raise ValueError(
            f'{kernel.__name__}: {error}; policy.evaluation = "reference" evaluates such shapes'
        ) from error


def check_device(policy: Policy) -> None:
    """The kernels that a policy installs can run here.

    Raises:
      ValueError: if there is no GPU for them.
    """
    if policy.evaluation == "mosaic" and jax.default_backend() != "gpu":
        raise ValueError(
            'policy.evaluation = "mosaic" needs NVIDIA Hopper GPUs, and jax sees none; '
            '"reference" evaluates on any device'
        )
