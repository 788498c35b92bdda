"""What makes a function an op: a named call that stays visible in the jaxpr and in StableHLO.

Floating-point arithmetic of the forward happens only inside ops. `numerics/audit.py` checks that by
the names given here, and the execution contract compares programs as sequences of these calls.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

PREFIX = "iso_"
F = TypeVar("F", bound=Callable[..., Any])

# name of an op -> the function as written, for the contract's hash of sources
REGISTRY: dict[str, Callable[..., Any]] = {}


def op(name: str, *, static: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorate a function as op `name`; `static` names its static arguments.

    The function is compiled as an inner call named ``iso_<name>``.
    """

    def wrap(function: F) -> F:
        if name in REGISTRY:
            raise ValueError(f"two ops are called {name!r}")
        REGISTRY[name] = function

        @functools.wraps(function)
        def body(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        body.__name__ = body.__qualname__ = PREFIX + name
        return jax.jit(body, static_argnames=static)  # type: ignore[return-value]

    return wrap


def is_op(name: str) -> bool:
    """Whether a jaxpr or StableHLO call of this name is an op, transposes and such included."""
    return PREFIX in name
