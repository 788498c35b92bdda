"""What a run does when it starts: compute or recall its contract, then prove it on the device."""

from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from isojax import distributed
from isojax.config import RunConfig, resolve_model
from isojax.contract import canary as canaries
from isojax.contract import cases, claims, environment
from isojax.contract.bisect import Bisector
from isojax.contract.build import build, inputs
from isojax.contract.canonical import ContractError
from isojax.contract.contract import Contract, from_document, load
from isojax.contract.enforce import check_pinned
from isojax.contract.sources import Sources
from isojax.sampler.engine import Runs
from isojax.sampler.settings import engine_config
from isojax.trainer import settings
from isojax.trainer.score import Scorer
from isojax.trainer.step import Trainer


def of_run(
    config: RunConfig,
    *,
    pinned: str | Path | None = None,
    known: str | Path | None = None,
    devices: list[jax.Device] | None = None,
) -> Contract:
    """The contract of a run on the devices that are here.

    Lowering every case takes longer than a small run likes to wait, and its result depends on the
    sources, the settings and the environment alone. It is kept under `runs_dir` by the digest of
    those, and a contract that was committed for them will do as well: `pinned` must hold, `known`
    is passed over if it is of other inputs.

    Several processes compare those inputs, and the first one's contract is the contract of all.

    Raises:
      ContractError: for a mesh that is not admitted, or if `pinned` is damaged or does not hold.
      MismatchError: the sources, settings or environment of another process are others.
    """
    claims.check_mesh(resolve_model(config), config.policy, config.mesh)
    seen = environment.observed(devices)
    platform, device = seen["platform"], seen["device"]
    key = inputs(config, platform, device, Sources())
    distributed.check_same("sources, model, packages, XLA flags or devices", key.encode())
    return from_document(
        distributed.share(lambda: _found(config, key, platform, device, pinned, known).document())
    )


def _found(
    config: RunConfig,
    key: str,
    platform: str,
    device: str,
    pinned: str | Path | None,
    known: str | Path | None,
) -> Contract:
    promised = None if pinned is None else load(pinned)
    if promised is not None and _serves(promised, key, config):
        return promised
    path = Path(config.runs_dir) / ".contracts" / f"{key}.json"
    now = _recalled(path) or (None if known is None else _recalled(Path(known)))
    if now is not None and not _serves(now, key, config):
        now = None
    if now is None:
        now = build(config, platform=platform, device=device)
        now.save(path)
    if promised is not None:
        check_pinned(promised, now)
    return now


def _serves(contract: Contract, key: str, config: RunConfig) -> bool:
    deployment = contract["deployment"]
    return deployment["inputs"] == key and str(config.mesh) in deployment["programs"]


def _recalled(path: Path) -> Contract | None:
    try:
        return load(path) if path.is_file() else None
    except ContractError:
        return None  # a damaged copy is made again


def self_check(
    contract: Contract,
    config: RunConfig,
    *,
    mesh: Mesh,
    executor: Runs,
    scorer: Scorer,
    trainer: Trainer,
    params: Any,
    weights_version: int,
) -> Contract:
    """Run the canary on the run's own engine, scorer and trainer; the contract with its evidence.

    Raises:
      ContractError: if a bit differs, naming the first layer and op where the two ways part.
    """
    model = resolve_model(config)
    batch = cases.abstract_batch(cases.deployed(config, config.mesh).train, mesh)
    loss = settings.policy_loss(config)
    lowered = (
        cases.trace_gradient(trainer, params, batch, loss).lower(),
        cases.trace_score(scorer, params, batch).lower(),
        cases.trace_update(trainer, params).lower(),
    )
    # the trainer's programs compile while the engine meets and compiles its own
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = [pool.submit(program.compile) for program in lowered]
        found = canaries.check(
            executor,
            engine_config(config),
            scorer,
            trainer,
            loss,
            params,
            vocab=model.vocab_size,
            chunk=config.policy.chunk,
            ranks=config.mesh.data,
            generated=partial(wait, compiled),
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
