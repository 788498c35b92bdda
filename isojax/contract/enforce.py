"""Where the contract is enforced: at start, on every rollout batch, on resume."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TextIO

from isojax.contract.canonical import ContractError
from isojax.contract.contract import Contract
from isojax.contract.diff import DEPLOYMENT, Change, diff


class Stamped(Protocol):
    """What a rollout carries: `isojax.sampler.request.Completion`."""

    @property
    def contract_digest(self) -> str: ...

    @property
    def weights_version(self) -> int: ...


def check_pinned(pinned: Contract, now: Contract) -> None:
    """A run keeps the contract that was pinned for it.

    Raises:
      ContractError: naming all that moves a bit since then.
    """
    if pinned.numerical != now.numerical:
        raise ContractError("the pinned contract is broken:\n" + _listed(diff(pinned, now)))


def check_rollout(contract: Contract, rollout: Iterable[Stamped], weights_version: int) -> None:
    """The trainer may learn from a rollout batch: it was made under this contract by these weights.

    Raises:
      ContractError: with both digests or versions, and how many samples carry the wrong one.
    """
    wrong = Counter(
        (item.contract_digest, item.weights_version)
        for item in rollout
        if (item.contract_digest, item.weights_version) != (contract.numerical, weights_version)
    )
    if not wrong:
        return
    (found, version), count = wrong.most_common(1)[0]
    if found != contract.numerical:
        raise ContractError(
            f"{count} samples were made under numerical contract {found or 'none'}, the trainer "
            f"holds {contract.numerical}: their log-probabilities are those of another program"
        )
    raise ContractError(
        f"{count} samples were made by weights of version {version}, the trainer's are version "
        f"{weights_version}"
    )


def check_resume(
    saved: Contract, now: Contract, *, accept: bool, out: TextIO | None = None
) -> list[Change]:
    """A checkpoint may be resumed; what differs from its contract, if that is accepted.

    accept: go on under another numerical contract (``--accept-contract-change``); the difference is
    printed to `out` (default: stderr).

    Raises:
      ContractError: if bits can move and that is not accepted, or if the model is another.
    """
    changes = [change for change in diff(saved, now) if change.identity != DEPLOYMENT]
    if saved.numerical == now.numerical:
        return []
    if saved.semantic != now.semantic:
        raise ContractError("the checkpoint is of another model:\n" + _listed(changes))
    if not accept:
        raise ContractError(
            "the checkpoint was written under another numerical contract:\n"
            + _listed(changes)
            + "\n--accept-contract-change resumes all the same; the run is then no longer "
            "reproducible from its start"
        )
    print("resuming under another contract:\n" + _listed(changes), file=out or sys.stderr)
    return changes


def _listed(changes: list[Change]) -> str:
    return "\n".join(f"  {change}" for change in changes if change.identity != DEPLOYMENT)
