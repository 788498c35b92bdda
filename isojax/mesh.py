"""The mesh: axes ("data", "context", "model"), and what a rank needs to know of it inside
`shard_map`.

Axes that cut rows (tokens) and axes that cut heads and widths meet in three places:

- "data" ranks hold different sequences.
- "context" ranks share a data rank's sequences and cut their rows into equal runs. Every op on rows
  sees its own run; attention and Gated DeltaNet see all rows of some of the heads.
- "model" ranks share rows and cut heads, hidden widths and vocabulary. With sequence parallelism
  they cut the rows too, between the regions whose weights they cut.
"""

import dataclasses
import re

import jax
import numpy as np
from jax.sharding import Mesh

DATA = "data"
CONTEXT = "context"
MODEL = "model"
# who meets a weight with rows of its own, and who holds heads of its own; both in this order
ROWS = (DATA, CONTEXT)
HEADS = (MODEL, CONTEXT)

_WRITTEN = re.compile(r"(\d+)x(\d+)(?:\+context(\d+))?(\+sequence)?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the mesh axes, and options of the parallel layout.

    data: ranks that hold different sequences.
    model: ranks that share a sequence's tokens and cut heads, hidden widths and vocabulary.
    context: ranks that share a data rank's sequences and cut their rows, for long sequences.
    sequence_parallel: between tensor-parallel regions each model rank keeps only its rows.
    """

    data: int = 1
    model: int = 1
    context: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "model", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def devices(self) -> int:
        return self.data * self.context * self.model

    @property
    def row_ranks(self) -> int:
        """Ranks whose weights meet different rows: "data" times "context"."""
        return self.data * self.context

    @property
    def head_ranks(self) -> int:
        """Ranks that attention's and Gated DeltaNet's heads are dealt to."""
        return self.model * self.context

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """The axes that cut the rows of the residual stream."""
        return (*ROWS, MODEL) if self.sequence_parallel else ROWS

    @property
    def stream_ranks(self) -> int:
        """Ranks that a data rank's rows of the residual stream are dealt to."""
        return self.context * (self.model if self.sequence_parallel else 1)

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
        grid = np.asarray(devices[: self.devices]).reshape(self.data, self.context, self.model)
        return Mesh(grid, (DATA, CONTEXT, MODEL))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """``"4x2"`` -> Layout(data=4, model=2); ``"2x2+context2+sequence"`` with both options."""
        written = _WRITTEN.fullmatch(text.lower())
        sizes = [int(size or 1) for size in written.groups()[:3]] if written else [0]
        if written is None or min(sizes) < 1:
            raise ValueError(
                "a mesh is written DATAxMODEL, such as 8x1, with +contextN or +sequence behind it "
                f"where wanted, not {text!r}"
            )
        data, model, context = sizes
        return cls(data, model, context, sequence_parallel=bool(written[4]))

    def __str__(self) -> str:
        context = f"+context{self.context}" if self.context > 1 else ""
        return f"{self.data}x{self.model}{context}{'+sequence' * self.sequence_parallel}"
