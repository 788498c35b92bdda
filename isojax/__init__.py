"""IsoJAX: one model, one forward, one set of kernels for the rollout engine and the trainer of RL."""

from isojax import runtime as _runtime

_runtime.configure()

__version__ = "0.1.0"
