"""Builds the contract of a run from its settings alone: no device, no weights, nothing compiled."""

import contextlib
import dataclasses
import gc
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from isojax.config import RunConfig, resolve_model
from isojax.contract import claims, environment
from isojax.contract.canonical import ContractError, bits, digest
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
    adamw,
    deployed,
    probe,
)
from isojax.contract.compare import erased, match, same
from isojax.contract.contract import Contract
from isojax.contract.skeleton import Call, Skeleton
from isojax.contract.sources import Sources, Symbol
from isojax.contract.stablehlo import Function, Program
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.numerics.policy import Policy
from isojax.ops.op import REGISTRY

# the first op behind the forward: the sampler needs whole logits, the trainer never builds them
HEADS = ("linear_logprob", "scaled_logits")
_ROWS_ONLY = (DECODE, PREFILL, MIXED, SCORE)  # cases without a backward
# of a model's description, what no number depends on
_NOT_SEMANTIC = ("eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings")


def build(
    config: RunConfig,
    *,
    platform: str = "cpu",
    device: str | None = None,
    meshes: Sequence[Layout] | None = None,
    sources: Sources | None = None,
) -> Contract:
    """The contract of a run.

    platform: "cpu" or "cuda"; neither need be here. device: see `environment.required`. meshes: those
    whose programs are lowered and recorded (default: the run's). sources: where the definitions are
    read (default: the installed packages).

    Raises:
      ContractError: for a mesh that is not admitted, or a case whose forward is another program.
    """
    model, policy = resolve_model(config), config.policy
    meshes = [config.mesh] if meshes is None else list(meshes)
    for layout in meshes:
        if reason := claims.refusal(model, policy, layout):
            raise ContractError(f"mesh {layout} is not admitted: {reason}")
    with _no_collection():
        probed = _Probed(config, platform)
        sections: dict[str, Any] = {
            "model": _model(model),
            "vocabulary": probed.vocabulary(),
            "policy": constants(policy),
            "training": training(config),
            "environment": environment.required(platform, device),
            "cases": probed.cases(),
            "equivalence": probed.equivalence(),
            "claims": {"meshes": claims.meshes(model, policy), "states": claims.STATES},
            "evidence": [],
        }
        sources = sources or Sources()
        sections |= _sources(sources, probed)
        sections["deployment"] = {
            "sizes": {str(layout): _sizes(config, layout) for layout in meshes},
            "programs": {str(layout): _programs(config, layout, platform) for layout in meshes},
            "tiles": sources.deployment(),
        }
    return Contract(sections)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Tracing makes millions of small objects that live; looking for dead ones costs a quarter of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _model(model: ModelConfig) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(model) if f.name not in _NOT_SEMANTIC]
    return {name: bits(getattr(model, name)) for name in names}


def constants(policy: Policy) -> dict[str, Any]:
    """Every constant of a policy as its bits."""
    return {f.name: bits(getattr(policy, f.name)) for f in dataclasses.fields(policy)}


def training(config: RunConfig) -> dict[str, Any]:
    """Constants of the loss and the update; batch sizes and schedules of checkpoints are not among them."""
    clip = {f"clip_{k}": getattr(config.algorithm, f"clip_{k}") for k in ("low", "high")}
    constants = {
        **clip,
        "dual_clip": config.algorithm.dual_clip,
        **dataclasses.asdict(adamw(config)),
    }
    return {name: bits(value) for name, value in constants.items()}


def _sizes(config: RunConfig, layout: Layout) -> dict[str, Any]:
    return dataclasses.asdict(deployed(config, layout))


def _programs(config: RunConfig, layout: Layout, platform: str) -> dict[str, Any]:
    """Digests of the very programs that a mesh runs, at the largest shapes."""
    lowering, sizes = Lowering(config, layout, platform), deployed(config, layout)
    out: dict[str, Any] = {}
    for case in (DECODE, MIXED, SCORE, STEP):
        programs = lowering.programs(case, sizes)
        kernels = [kernel for program in programs for kernel in program.kernels]
        out[case] = {
            "stablehlo": [program.digest for program in programs],
            "kernels": sorted({f"{kernel.name} {kernel.module}" for kernel in kernels}),
        }
    return out


@dataclasses.dataclass(frozen=True)
class _Probe:
    """A case lowered at one size on one device."""

    programs: list[Program]
    skeletons: list[Skeleton]

    @property
    def head(self) -> tuple[str, list[Call]]:
        return self.skeletons[0].forward(HEADS)

    def function(self, call: Call) -> Function:
        return self.programs[0][call.function]

    def text(self, call: Call) -> str:
        return self.programs[0].expanded(call.function)


class _Probed:
    """All cases at the contract's own sizes on one device, and what they have in common."""

    def __init__(self, config: RunConfig, platform: str) -> None:
        one = Layout(1, 1)
        lowering = Lowering(config, one, platform)
        weights = len(jax.tree.leaves(lowering.params))
        self._entries = {
            kind: resolve_model(config).layer_types.count(kind)
            for kind in ("full_attention", "linear_attention")
        }
        self._sizes = [probe(config.policy, *scale) for scale in PROBES]
        small, large = self._sizes
        names = (MIXED, DECODE, SCORE)
        self.small = {
            case: self._probe(lowering.programs(case, small), small, weights)
            for case in (*names, FORWARD, RECOMPUTE)
        }
        update = Program(lowering.update().lower(lowering_platforms=(platform,)))
        self.update = _Probe([update], [Skeleton(update, (), 0)])
        self.large = {
            case: self._probe(lowering.programs(case, large), large, weights) for case in names
        }

    @staticmethod
    def _probe(programs: list[Program], sizes: Any, weights: int) -> _Probe:
        pools = (sizes.pages, sizes.slots)
        return _Probe(programs, [Skeleton(p, pools, weights) for p in programs])

    def vocabulary(self) -> list[str]:
        """Ops of the forward in the order of their calls, one period of layers."""
        return [call.op for call in self.small[SCORE].head[1]]

    def used(self) -> dict[str, list[Function]]:
        """{op: functions that its calls became, in any case}."""
        out: dict[str, list[Function]] = {}
        for item in (*self.small.values(), self.update):
            for call in item.skeletons[0].calls:
                out.setdefault(call.op, []).append(item.function(call))
        return out

    def cases(self) -> dict[str, Any]:
        """The numerical identity of each case: its movement, its calls and their bodies."""
        out: dict[str, Any] = {}
        for name in CASES:
            if name == STEP:
                out[name] = {"gradient": RECOMPUTE, "update": self._whole(self.update)}
                continue
            at = MIXED if name == PREFILL else name
            found = self._erased(at) if at in self.large else self._whole(self.small[at])
            out[name] = {"what": CASES[name], **found}
        out[STEP]["what"] = CASES[STEP]
        return out

    def _erased(self, case: str) -> dict[str, Any]:
        """The row-erased program of a case without a backward."""
        left, right = self.small[case], self.large[case]
        texts = [item.skeletons[0].forward(())[0] for item in (left, right)]
        text = erased(*texts)
        if text is None:
            raise ContractError(
                f"{case}: what happens between the ops depends on how many rows there are "
                f"({match(*texts).where})"
            )
        calls = []
        ours, theirs = left.skeletons[0].calls, right.skeletons[0].calls
        for a, b in zip(ours, theirs, strict=True):
            function = left.function(a)
            body = None if function.kernels else erased(left.text(a), right.text(b))
            calls.append((a.op, _body(function) if body is None else digest(body)))
        return {"rows_erased": True, "between_ops": digest(text), "ops": _by_op(calls)}

    @staticmethod
    def _whole(item: _Probe) -> dict[str, Any]:
        """A case with a backward, at the contract's own size."""
        skeleton = item.skeletons[0]
        calls = []
        for call in skeleton.calls:
            function = item.function(call)
            calls.append((call.op, _body(function) if function.kernels else function.digest))
        text = skeleton.forward(())[0]
        return {"rows_erased": False, "between_ops": digest(text), "ops": _by_op(calls)}

    def equivalence(self) -> dict[str, Any]:
        """Every case against the trainer's score: what text proves, and what it leaves to the canary.

        Calls that depend on no weight are not counted: differentiation moves parts of ops that read positions
        alone in front of the loop over layers.

        Raises:
          ContractError: if a case calls other ops, or moves their rows otherwise.
        """
        text, calls = self.small[SCORE].head
        out: dict[str, Any] = {}
        for case in (DECODE, PREFILL, MIXED, FORWARD, RECOMPUTE):
            item = self.small[MIXED if case == PREFILL else case]
            other, theirs = item.head
            wanted = [c.op for c in calls if c.weighted]
            found = [c.op for c in theirs if c.weighted]
            if wanted != found:
                at = next(
                    (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
                    min(len(wanted), len(found)),
                )
                raise ContractError(
                    f"{case} calls other ops than {SCORE}: call {at} is "
                    f"{found[at : at + 1] or 'missing'}, not {wanted[at : at + 1] or 'there'}"
                )
            if case in (FORWARD, RECOMPUTE):
                out[case] = {"calls": len(found), "proof": "the same sequence of op calls"}
                continue
            if text != other:
                raise ContractError(
                    f"{case} moves rows between ops otherwise than {SCORE}: "
                    f"{match(text, other).where or match(text, other).pairs}"
                )
            out[case] = {
                "calls": len(found),
                "proof": "the same program text between ops",
                "ops": self._bodies(case, item, theirs, calls),
            }
        return out

    def _bodies(
        self, case: str, item: _Probe, ours: list[Call], theirs: list[Call]
    ) -> dict[str, str]:
        """Per op, the weakest of its calls: "text", "text, entries of the cache aside", or "canary"."""
        rank = ("text", "text, entries of the cache aside", "canary")
        reference, sizes = self.small[SCORE], self._sizes[0]
        admitted = {(n, 1) for n in self._entries.values()} | {
            (n * size, size) for n in self._entries.values() for size in (sizes.pages, sizes.slots)
        }
        out: dict[str, str] = {}
        for a, b in zip(ours, theirs, strict=True):
            left, right = item.text(a), reference.text(b)
            grade = 0 if left == right else 1 if same(left, right, admitted) else 2
            out[a.op] = rank[max(grade, rank.index(out.get(a.op, rank[0])))]
        return out


def _body(function: Function) -> str:
    """Identity of an op's body that holds kernels: their names and arithmetic; tiles are free."""
    names = sorted({kernel.name for kernel in function.kernels})
    return digest({"kernels": names, "arithmetic": sorted(function.arithmetic)})


def _by_op(calls: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{op: how often it is called, digest of the bodies of its calls in order}."""
    bodies: dict[str, list[str]] = {}
    for op, body in calls:
        bodies.setdefault(op, []).append(body)
    return {op: {"calls": len(items), "bodies": digest(items)} for op, items in bodies.items()}


def _sources(sources: Sources, probed: _Probed) -> dict[str, Any]:
    """`ops` and `definitions`: every op in use, what it reaches, what it computes with."""
    definitions: dict[str, str] = {}
    ops: dict[str, Any] = {}
    for name, functions in sorted(probed.used().items()):
        if name not in REGISTRY:
            raise ContractError(f"a program calls op {name!r}, which is not registered")
        written = inspect.unwrap(REGISTRY[name])
        reached = sources.closure([Symbol(written.__module__, written.__name__)])
        definitions |= reached
        kernels = {kernel.name for function in functions for kernel in function.kernels}
        arithmetic = frozenset().union(*(function.arithmetic for function in functions))
        ops[name] = {
            "source": digest(reached),
            "kernels": sorted(kernels),
            "arithmetic": sorted(arithmetic),
        }
    return {"ops": ops, "definitions": definitions}
