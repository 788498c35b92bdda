"""The cases at the contract's own sizes on one device: what the numerical identity is made of.

Two sizes are lowered. What differs between their texts counts rows, sequences or pages, and only
integers may: each becomes a hole. The sizes belong to the contract, so no bucket, page or mesh of a
run is in them.
"""

import dataclasses
import functools
from typing import Any

import jax

from isojax.config import RunConfig
from isojax.contract.canonical import ContractError, digest
from isojax.contract.cases import (
    CASES,
    DECODE,
    FORWARD,
    MIXED,
    PREFILL,
    PROBES,
    RECOMPUTE,
    SCORE,
    STEP,
    Lowering,
    Sizes,
    probe,
)
from isojax.contract.compare import erased, match
from isojax.contract.skeleton import Call, Skeleton
from isojax.contract.stablehlo import Function, Program
from isojax.mesh import Layout

# the first op behind the forward: the sampler needs whole logits, the trainer never builds them
HEADS = ("linear_logprob", "scaled_logits")

_ERASED = (MIXED, DECODE, SCORE)  # cases without a backward


@dataclasses.dataclass(frozen=True)
class Probe:
    """A case lowered at one size on one device."""

    program: Program
    skeleton: Skeleton

    @property
    def calls(self) -> list[Call]:
        """All op calls in order."""
        return self.skeleton.calls

    @property
    def forward(self) -> tuple[str, list[Call]]:
        """Text between the ops of the forward, and its op calls, up to the head."""
        return self.skeleton.forward(HEADS)

    def function(self, call: Call) -> Function:
        """The function that an op call became."""
        return self.program[call.function]

    def text(self, call: Call) -> str:
        """Its text, helpers included."""
        return self.program.expanded(call.function)


class Probed:
    """All cases at the contract's own sizes on one device, and what they have in common."""

    def __init__(self, config: RunConfig, platform: str) -> None:
        lowering = Lowering(config, Layout(1, 1), platform)
        weights = len(jax.tree.leaves(lowering.params))
        self._lowering, self._platform, self._weights = lowering, platform, weights
        self.sizes, self._large_sizes = (probe(config.policy, *scale) for scale in PROBES)
        kinds = lowering.model.layer_types
        self.cache_entries = {kinds.count(kind) for kind in kinds}

    def _probe(self, case: str, sizes: Sizes) -> Probe:
        (program,) = self._lowering.programs(case, sizes)
        return Probe(program, Skeleton(program, (sizes.pages, sizes.slots), self._weights))

    @functools.cached_property
    def small(self) -> dict[str, Probe]:
        """Every case but the update, at the first size."""
        cases = (*_ERASED, FORWARD, RECOMPUTE)
        return {case: self._probe(case, self.sizes) for case in cases}

    @functools.cached_property
    def large(self) -> dict[str, Probe]:
        """Those whose rows are erased, at the second."""
        return {case: self._probe(case, self._large_sizes) for case in _ERASED}

    @functools.cached_property
    def update(self) -> Probe:
        """The optimizer's, which has no rows."""
        program = Program(self._lowering.update().lower(lowering_platforms=(self._platform,)))
        return Probe(program, Skeleton(program, (), 0))

    def vocabulary(self) -> list[str]:
        """Ops of the forward in the order of their calls, one period of layers."""
        return [call.op for call in self.small[SCORE].forward[1]]

    def used(self) -> dict[str, list[Function]]:
        """{op: functions that its calls became, in any case}."""
        out: dict[str, list[Function]] = {}
        for item in (*self.small.values(), self.update):
            for call in item.calls:
                out.setdefault(call.op, []).append(item.function(call))
        return out

    def cases(self) -> dict[str, Any]:
        """The numerical identity of each case: its movement, its calls and their bodies."""
        out: dict[str, Any] = {}
        for name in CASES:
            if name == STEP:
                out[name] = {"gradient": [FORWARD, RECOMPUTE], "update": self._whole(self.update)}
                continue
            at = MIXED if name == PREFILL else name
            found = self._erased(at) if at in _ERASED else self._whole(self.small[at])
            out[name] = {"what": CASES[name], **found}
        out[STEP]["what"] = CASES[STEP]
        return out

    def _erased(self, case: str) -> dict[str, Any]:
        """The row-erased program of a case without a backward."""
        left, right = self.small[case], self.large[case]
        texts = [item.skeleton.forward(())[0] for item in (left, right)]
        text = erased(*texts)
        if text is None:
            raise ContractError(
                f"{case}: what happens between the ops depends on how many rows there are "
                f"({match(*texts).where})"
            )
        calls = []
        for a, b in zip(left.calls, right.calls, strict=True):
            function = left.function(a)
            body = None if function.kernels else erased(left.text(a), right.text(b))
            identity = _body(function) if body is None else digest(body)
            calls.append((a.op, identity, body is not None))
        return {"rows_erased": True, "between_ops": digest(text), "ops": _by_op(calls)}

    @staticmethod
    def _whole(item: Probe) -> dict[str, Any]:
        """A case with a backward, at the contract's own size."""
        calls = []
        for call in item.calls:
            function = item.function(call)
            body = _body(function) if function.kernels else function.digest
            calls.append((call.op, body, False))
        text = item.skeleton.forward(())[0]
        return {"rows_erased": False, "between_ops": digest(text), "ops": _by_op(calls)}


def _body(function: Function) -> str:
    """Identity of an op's body that holds kernels: their names and arithmetic; tiles are free."""
    names = sorted({kernel.name for kernel in function.kernels})
    return digest({"kernels": names, "arithmetic": sorted(function.arithmetic)})


def _by_op(calls: list[tuple[str, str, bool]]) -> dict[str, dict[str, Any]]:
    """{op: its calls, digest of their bodies, whether these are row-erased texts}."""
    bodies: dict[str, list[tuple[str, bool]]] = {}
    for op, body, erased_ in calls:
        bodies.setdefault(op, []).append((body, erased_))
    return {
        op: {
            "calls": len(items),
            "bodies": digest([body for body, _ in items]),
            "rows_erased": all(erased_ for _, erased_ in items),
        }
        for op, items in bodies.items()
    }
