"""IsoJAX: one model, one forward, one set of kernels for rollout engine and trainer."""

from isojax import runtime as _runtime

_runtime.configure()

__version__ = "0.1.0"
