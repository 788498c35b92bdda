"""What a run does when it starts: compute or recall its contract, then prove it on the device."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from isojax.config import RunConfig, resolve_model
from isojax.contract import canary as canaries
from isojax.contract import environment
from isojax.contract.bisect import Bisector
from isojax.contract.build import build, training
from isojax.contract.canonical import ContractError, bits, digest
from isojax.contract.cases import engine_config
from isojax.contract.contract import VERSION, Contract, load
from isojax.contract.sources import Sources
from isojax.sampler.executor import Executor
from isojax.trainer.score import Scorer


def of_run(config: RunConfig, devices: list[Any] | None = None) -> Contract:
    """The contract of a run on the devices that are here.

    Lowering every case takes longer than a small run likes to wait, and depends on the sources, the
    settings and the environment alone: the result is kept under `runs_dir` by the digest of those.
    """
    seen = environment.observed(devices)
    platform, device = seen["platform"], seen["device"]
    key = _key(config, platform, device)
    path = Path(config.runs_dir) / ".contracts" / f"{key}.json"
    if path.is_file():
        try:
            return load(path)
        except ContractError:
            pass  # a damaged copy is made again
    contract = build(config, platform=platform, device=device)
    contract.save(path)
    return contract


def _key(config: RunConfig, platform: str, device: str) -> str:
    """Digest of all that `build` reads."""
    model = resolve_model(config)
    read = {
        "version": VERSION,
        "sources": Sources().everything(),
        "model": _fields(model),
        "policy": _fields(config.policy),
        "training": training(config),
        "sizes": [_fields(config.sampler), _fields(config.trainer), _fields(config.mesh)],
        "length": config.max_length,
        "environment": environment.required(platform, device),
    }
    return digest(read)


def _fields(instance: Any) -> dict[str, Any]:
    return {f.name: bits(getattr(instance, f.name)) for f in dataclasses.fields(instance)}


def self_check(
    contract: Contract,
    config: RunConfig,
    *,
    mesh: Mesh,
    executor: Executor,
    scorer: Scorer,
    params: Any,
    weights_version: int,
) -> Contract:
    """Run the canary on the run's own engine and scorer; the contract with its evidence.

    Raises:
      ContractError: if a bit differs, naming the first layer and op where the two ways part.
    """
    model = resolve_model(config)
    found = canaries.check(
        executor,
        engine_config(config),
        scorer,
        params,
        vocab=model.vocab_size,
        chunk=config.policy.chunk,
        ranks=config.mesh.data,
    )
    if found.first is not None:
        bisector = Bisector(model, config.policy, config.mesh, mesh, params)
        raise ContractError(f"{canaries.describe(found)}\n{bisected(bisector, found.first)}")
    return contract.with_evidence(found.evidence(config.mesh, weights_version))


def bisected(bisector: Bisector, parting: canaries.Parting) -> str:
    """Where a parting begins, in words."""
    where = bisector.find(parting.tokens[:-1], parting.prompt_length)
    if where is None:
        return (
            "op by op the two agree: the bits part only when ops are compiled together or beside "
            "other sequences, so XLA moved arithmetic across an op's edge"
        )
    return f"first difference: {where}"
