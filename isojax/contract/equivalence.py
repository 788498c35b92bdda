"""One forward backs every case: what the lowered text proves, and what it leaves to the canary."""

from typing import Any

from isojax.contract.canonical import ContractError
from isojax.contract.cases import DECODE, FORWARD, MIXED, PREFILL, RECOMPUTE, SCORE
from isojax.contract.compare import match, same
from isojax.contract.probed import Probe, Probed
from isojax.contract.skeleton import Call

TEXT = "text"
ENTRIES = "text, entries of the cache aside"
CANARY = "canary"
_WEAKENING = (TEXT, ENTRIES, CANARY)


def equivalence(probed: Probed) -> dict[str, Any]:
    """Every case against the trainer's score, at the same sizes.

    Sampler: the text between ops is the same; per op, whether the bodies of all its calls are.
    Trainer with a
    backward: the same sequence of op calls, but for those that depend on no weight, since
    differentiation moves parts of ops that read positions alone in front of the loop over layers.

    Raises:
      ContractError: if a case calls other ops, or moves their rows otherwise.
    """
    reference = probed.small[SCORE]
    text, calls = reference.forward
    admitted = _admitted(probed)
    out: dict[str, Any] = {}
    for case in (DECODE, PREFILL, MIXED, FORWARD, RECOMPUTE):
        item = probed.small[MIXED if case == PREFILL else case]
        other, theirs = item.forward
        _check_sequence(case, theirs, calls)
        out[case] = {"calls": sum(call.weighted for call in theirs)}
        if case in (FORWARD, RECOMPUTE):
            out[case]["proof"] = "the same sequence of op calls"
            continue
        if text != other:
            found = match(other, text)
            raise ContractError(
                f"{case} moves rows between ops otherwise than {SCORE}: "
                f"{found.where or sorted(found.pairs)[:4]}"
            )
        out[case]["proof"] = "the same program text between ops"
        out[case]["ops"] = _bodies(item, theirs, reference, calls, admitted)
        out[case]["head"] = {
            "ops": [call.op for call in item.calls[len(theirs) :]],
            "reference": [call.op for call in reference.calls[len(calls) :]],
            "proof": CANARY,
        }
    return out


def _admitted(probed: Probed) -> set[tuple[int, int]]:
    """Integers that tell the sampler's cache, an entry a layer, from the trainer's, one for all."""
    sizes = (1, probed.sizes.pages, probed.sizes.slots)
    return {(n * size, size) for n in probed.cache_entries for size in sizes}


def _check_sequence(case: str, calls: list[Call], reference: list[Call]) -> None:
    wanted = [call.op for call in reference if call.weighted]
    found = [call.op for call in calls if call.weighted]
    if wanted == found:
        return
    pairs = enumerate(zip(wanted, found, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(found)))
    named = [ops[at] if at < len(ops) else "none" for ops in (found, wanted)]
    raise ContractError(
        f"{case} calls other ops than {SCORE}: call {at} is {named[0]}, not {named[1]}"
    )


def _bodies(
    item: Probe,
    calls: list[Call],
    reference: Probe,
    others: list[Call],
    admitted: set[tuple[int, int]],
) -> dict[str, str]:
    """Per op, the proof of the weakest of its calls."""
    out: dict[str, str] = {}
    for a, b in zip(calls, others, strict=True):
        left, right = item.text(a), reference.text(b)
        proof = TEXT if left == right else ENTRIES if same(left, right, admitted) else CANARY
        out[a.op] = max(out.get(a.op, TEXT), proof, key=_WEAKENING.index)
    return out
