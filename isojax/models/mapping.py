"""The vocabulary in which a model says how a checkpoint's tensors hold its parameters.

A parameter of one layer (of one expert, where experts are stored apart) is a part of one tensor:
the whole of it, transposed where a linear map is stored [out, in], or, where the published model
computes several maps by one matrix, the rows that belong to it. Reading takes those rows, writing
fills them; both are exact.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a parameter stands in a checkpoint.

    name: the tensor's name; "{layer}" and "{expert}" are filled in. With "{expert}" the parameter's
      leading axis is the expert.
    transpose: the tensor holds the parameter's last two axes swapped.
    channels: the tensor is a depthwise convolution's [channels, 1, width].
    sizes, index: the tensor's row axis (the parameter's last axis if transposed, else its first)
      is a sequence of equal groups, each with `sizes[0]` rows of one parameter, then `sizes[1]` of
      the next, ...; this parameter is number `index`. Empty: every row is the parameter's.
    """

    name: str
    transpose: bool = False
    channels: bool = False
    sizes: tuple[int, ...] = ()
    index: int = 0

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name

    @property
    def row_axis(self) -> int:
        """The parameter's axis along which the tensor interleaves it with others."""
        return -1 if self.transpose else 0

    def rows(self, count: int) -> np.ndarray:
        """The tensor's row for each of the parameter's `count` rows, in order."""
        row = np.arange(count)
        if not self.sizes:
            return row
        size, before = self.sizes[self.index], sum(self.sizes[: self.index])
        return row // size * sum(self.sizes) + before + row % size

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, given the parameter's: of one layer, and of one expert if stored
        apart."""
        sides = list(shape)
        if self.sizes:
            groups = sides[self.row_axis] // self.sizes[self.index]
            sides[self.row_axis] = groups * sum(self.sizes)
        if self.transpose:
            sides[-1], sides[-2] = sides[-2], sides[-1]
        if self.channels:
            sides.insert(1, 1)
        return tuple(sides)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with its axes in the parameter's order, as a view; its row axis is still
        whole."""
        if self.channels:
            tensor = tensor[:, 0]
        return tensor.swapaxes(-1, -2) if self.transpose else tensor


# A parameter's parts, best first: the first is how it is written, any may be read.
Tensors = dict[str, tuple[Part, ...]]


def whole(name: str) -> tuple[Part]:
    """A tensor stored as the parameter is."""
    return (Part(name),)


def linear(name: str) -> tuple[Part]:
    """A linear map, stored [out, in]."""
    return (Part(name, transpose=True),)


def fused_linear(name: str, sizes: Sequence[int]) -> list[tuple[Part]]:
    """Linear maps whose outputs interleave in groups of `sizes`, stored as one [out, in]."""
    return [(Part(name, transpose=True, sizes=tuple(sizes), index=i),) for i in range(len(sizes))]


def fused_convolution(name: str, sizes: Sequence[int]) -> list[tuple[Part]]:
    """Depthwise convolutions side by side, stored as one [channels, 1, width]."""
    return [(Part(name, channels=True, sizes=tuple(sizes), index=i),) for i in range(len(sizes))]


def experts(prefix: str, width: int) -> Tensors:
    """Experts of hidden width `width`: three tensors an expert, or all of a layer's fused in two.

    Apart: PREFIX.{expert}.gate_proj.weight and so on, [out, in]. Fused: PREFIX.gate_up_proj
    [experts, 2 * width, in], the gate's rows first, and PREFIX.down_proj [experts, out, width].
    """
    apart = f"{prefix}.{{expert}}."
    gate, up = fused_linear(f"{prefix}.gate_up_proj", (width, width))
    return {
        "gate": linear(apart + "gate_proj.weight") + gate,
        "up": linear(apart + "up_proj.weight") + up,
        "down": linear(apart + "down_proj.weight") + linear(f"{prefix}.down_proj"),
    }


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The same tensors for parameters below `prefix`."""
    return {f"{prefix}.{name}": parts for name, parts in tensors.items()}
