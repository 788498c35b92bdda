"""The audit of `numerics/audit.py`, run on the calls that sampler and trainer make."""

from collections.abc import Sequence

from isojax.config import RunConfig
from isojax.contract.cases import DECODE, MIXED, PROBES, SCORE, Lowering, probe
from isojax.mesh import Layout
from isojax.numerics.audit import findings as outside_ops


def findings(config: RunConfig, platform: str, meshes: Sequence[Layout]) -> list[str]:
    """Float arithmetic outside ops, a line each, in the cases that have no backward."""
    out: list[str] = []
    for layout in meshes:
        lowering = Lowering(config, layout, platform)
        sizes = probe(config.policy, *PROBES[0])
        for case in (DECODE, MIXED, SCORE):
            for traced in lowering.traced(case, sizes):
                found = outside_ops(traced.jaxpr.jaxpr)
                out += [f"mesh {layout}, {case}: {finding}" for finding in found]
    return out
