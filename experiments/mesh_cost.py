"""What mesh invariance costs on the wire and in adds, counted in the programs that a mesh runs.

    python experiments/mesh_cost.py --config configs/qwen3_5_35b_a3b.toml --mesh 8x1 --mesh 1x8

Traces the decode call, the mixed call and one training call (forward, backward) of the largest
deployed shapes, and the update, and walks them with their loops. For every collective: the bytes
that a device receives and its adds, and those of the plain collective in its place. That is, for a
sum of activations, a ring's reduce-scatter of values rounded to the compute dtype (followed by an
all-gather where every rank wants the sum); for other sums a ring's all-reduce in float32; for
movement the same movement. Nothing is compiled and no device is needed.
"""

import argparse
import collections
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isojax import config_io
from isojax.contract import cases
from isojax.contract.stablehlo import op_name
from isojax.mesh import Layout

MOVES = ("all_gather", "all_to_all")
# float32, but no part of a sum: logits for the sampler, routing weights, what no op does
ONLY_MOVED = ("scaled_logits", "experts", "-")
# sums of activations, which other systems round before they add
ROUNDED_SUMS = ("rows", "columns", "linear_logprob")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: in which op, how often, over how many ranks.

    received, usual: bytes that a device receives, here and with the plain collective in its place.
    adds, usual_adds: float32 additions of a device.
    """

    op: str
    kind: str
    ranks: int
    times: int
    received: int
    usual: int
    adds: int
    usual_adds: int


def inner(equation: Any) -> Iterator[tuple[Any, int]]:
    """The jaxprs within an equation and how often each runs; rounds of an exchange, once."""
    times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr, times


def walk(jaxpr: Any, sizes: dict[str, int], op: str = "-", times: int = 1) -> Iterator[Collective]:
    """Every collective of a jaxpr, loops counted."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in MOVES:
            axes = equation.params["axis_name"]
            axes = axes if isinstance(axes, tuple) else (axes,)
            ranks = math.prod(sizes[axis] for axis in axes)
            yield count(name, op, ranks, times, equation.invars[0].aval)
        here = op_name(equation.params.get("name", "")) or op
        for body, often in inner(equation):
            yield from walk(body, sizes, here, times * often)


def count(kind: str, op: str, ranks: int, times: int, part: Any) -> Collective:
    """part: what a rank puts in. Sums travel in float32; what is only moved is rounded before."""
    size, width = part.size, part.dtype.itemsize
    tree = part.dtype == np.float32 and op not in ONLY_MOVED
    if kind == "all_gather":  # of a sum: every rank receives all parts and adds them
        received = usual = (ranks - 1) * size * width
        adds, usual_adds = (ranks - 1) * size, (ranks - 1) * size // ranks
        if tree:
            usual = 2 * received // ranks
    else:  # of a sum: a rank receives its block of every part
        received = usual = (ranks - 1) * size * width // ranks
        adds = usual_adds = (ranks - 1) * size // ranks
        if op in ROUNDED_SUMS:
            usual = received // 2
    if not tree:
        adds = usual_adds = 0
    return Collective(
        op, kind, ranks, times, *(times * x for x in (received, usual, adds, usual_adds))
    )


def table(found: list[Collective]) -> str:
    """By op and kind: calls, megabytes received (here, usual), millions of adds (here, usual)."""
    rows: dict[tuple[str, str, int], list[int]] = collections.defaultdict(lambda: [0] * 5)
    for c in found:
        row = rows[c.op, c.kind, c.ranks]
        for i, x in enumerate((c.times, c.received, c.usual, c.adds, c.usual_adds)):
            row[i] += x
    lines = ["| op | moves | ranks | calls | MB here | MB usual | Madds here | Madds usual |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    total = [sum(column) for column in zip(*rows.values(), strict=True)] if rows else [0] * 5
    for (op, kind, ranks), row in [*sorted(rows.items()), (("all", "", 0), total)]:
        calls, *rest = row
        cells = [f"{x / 1e6:.2f}" for x in rest]
        lines.append(f"| {op} | {kind} | {ranks or ''} | {calls} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--mesh", type=Layout.parse, action="append", required=True)
    arguments = parser.parse_args()
    config = config_io.load(arguments.config)
    # collectives are the same under either evaluation; the reference traces anywhere
    policy = dataclasses.replace(config.policy, evaluation="reference")
    config = dataclasses.replace(config, policy=policy)
    for layout in arguments.mesh:
        lowering = cases.Lowering(config, layout, "cpu")
        sizes = cases.deployed(config, layout)
        axes = {"data": layout.data, "context": layout.context, "model": layout.model}
        for case in (cases.DECODE, cases.MIXED, cases.STEP):
            names = ("", "update") if case == cases.STEP else ("",)
            rows = {cases.DECODE: sizes.decode, cases.MIXED: sizes.mixed}.get(case, sizes.train)
            for name, traced in zip(names, lowering.traced(case, sizes), strict=True):
                found = list(walk(traced.jaxpr.jaxpr, axes))
                title = name or ("gradient of one call" if names[1:] else case)
                print(f"\n### {layout}, {title}, {rows.tokens} rows a data rank\n")
                print(table([c for c in found if c.ranks > 1]), flush=True)


if __name__ == "__main__":
    main()
