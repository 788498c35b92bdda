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
from isojax.contract.cases import DECODE, MIXED, SCORE, STEP, WRITTEN, Lowering, deployed
from isojax.contract.contract import VERSION, Contract
from isojax.contract.equivalence import equivalence
from isojax.contract.probed import Probed
from isojax.contract.sources import Sources, Symbol
from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.ops.op import REGISTRY
from isojax.trainer import settings

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

    platform: "cpu" or "cuda"; neither need be here. device: see `environment.required`. meshes:
    those whose programs are lowered and recorded (default: the run's). sources: where the
    definitions are read (default: the installed packages).

    Raises:
      ContractError: for a mesh that is not admitted, or a case whose forward is another program.
    """
    model, policy = resolve_model(config), config.policy
    meshes = [config.mesh] if meshes is None else list(meshes)
    for layout in meshes:
        claims.check_mesh(model, policy, layout)
    world = environment.required(platform, device)
    with _lean():
        probed = Probed(config, platform)
        proofs = equivalence(probed)  # refuses soonest
        sections: dict[str, Any] = {
            "model": _model(model),
            "vocabulary": probed.vocabulary(),
            "policy": constants(policy),
            "training": training(config),
            "environment": world,
            "cases": probed.cases(),
            "equivalence": proofs,
            "claims": {"meshes": claims.meshes(model, policy), "states": claims.STATES},
            "evidence": [],
        }
        sources = sources or Sources()
        sections |= _sources(sources, probed)
        sections["deployment"] = {
            "inputs": inputs(config, platform, device, sources),
            "sizes": {str(layout): _sizes(config, layout) for layout in meshes},
            "programs": {str(layout): _programs(config, layout, platform) for layout in meshes},
            "tiles": sources.deployment(),
        }
    return Contract(sections)


def inputs(config: RunConfig, platform: str, device: str | None, sources: Sources) -> str:
    """Digest of all that `build` reads: an equal one means an equal contract, meshes aside."""
    return digest(
        {
            "version": VERSION,
            "sources": sources.everything(),
            "model": constants(resolve_model(config)),
            "policy": constants(config.policy),
            "training": training(config),
            "sizes": [constants(x) for x in (config.sampler, config.trainer, config.mesh)],
            "length": config.max_length,
            "environment": environment.required(platform, device),
        }
    )


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Lowering without what no digest reads.

    Tracing makes millions of objects that live on, so collecting garbage would cost a quarter of
    the time; stacks of callers at every instruction cost a tenth.
    """
    enabled, frames = gc.isenabled(), jax.config.jax_traceback_in_locations_limit
    gc.disable()
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
        if enabled:
            gc.enable()


def _model(model: ModelConfig) -> dict[str, Any]:
    return {k: v for k, v in constants(model).items() if k not in _NOT_SEMANTIC}


def constants(record: Any) -> dict[str, Any]:
    """Every field of a dataclass, such as a policy, as its bits."""
    return {f.name: bits(getattr(record, f.name)) for f in dataclasses.fields(record)}


def training(config: RunConfig) -> dict[str, Any]:
    """Constants of the loss and of the update; how many rows a leaf has orders their sums."""
    constants = {
        **dataclasses.asdict(settings.policy_loss(config)),
        **dataclasses.asdict(settings.adamw(config)),
        **dataclasses.asdict(settings.schedule(config)),
        "warm_learning_rate": settings.warm_schedule(config).learning_rate,
        "microbatch_tokens": config.trainer.microbatch_tokens,
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


def _sources(sources: Sources, probed: Probed) -> dict[str, Any]:
    """`ops` and `definitions`: every op in use, what it reaches, what it computes with; and what
    brings the rows to the ops."""
    definitions = sources.closure(Symbol(x.__module__, x.__name__) for x in WRITTEN)
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
