"""The mesh: axes ("data", "model"), and what a rank needs to know of it inside `shard_map`."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

DATA = "data"
MODEL = "model"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the mesh axes, and options of the parallel layout.

    data: ranks that hold different sequences.
    model: ranks that share a sequence's tokens and cut heads, hidden widths and vocabulary.
    sequence_parallel: between tensor-parallel regions each model rank keeps only its rows.
    """

    data: int = 1
    model: int = 1
    sequence_parallel: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.model

    def mesh(self, devices: list[jax.Device] | None = None) -> Mesh:
        """The jax mesh over `devices` (default: the first of `jax.devices()`).

        Raises:
          ValueError: if there are fewer devices than the layout needs.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.devices:
            raise ValueError(
                f"mesh {self} needs {self.devices} devices, {len(devices)} are there "
                "(on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=N)"
            )
        grid = np.asarray(devices[: self.devices]).reshape(self.data, self.model)
        return Mesh(grid, (DATA, MODEL))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """``"4x2"`` -> Layout(data=4, model=2)."""
        try:
            data, model = (int(part) for part in text.lower().split("x"))
            if data < 1 or model < 1:
                raise ValueError
        except ValueError:
            raise ValueError(f"a mesh is written DATAxMODEL, such as 8x1, not {text!r}") from None
        return cls(data, model)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"
