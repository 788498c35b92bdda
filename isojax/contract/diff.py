"""What moved between two contracts, in words: constants, ops, kernels, versions, and where."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from isojax.contract.canonical import readable
from isojax.contract.contract import Contract

SEMANTIC, NUMERICAL, DEPLOYMENT = "semantic", "numerical", "deployment"


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference. identity: the strongest identity that it moves. what: a sentence."""

    identity: str
    what: str

    def __str__(self) -> str:
        return f"{self.identity}: {self.what}"


def diff(old: Contract, new: Contract) -> list[Change]:
    """All differences of two contracts, the gravest first; evidence is no difference."""
    return [
        *_constants(SEMANTIC, "model", old, new),
        *_vocabulary(old, new),
        *_constants(NUMERICAL, "policy", old, new),
        *_constants(NUMERICAL, "training", old, new),
        *_environment(old, new),
        *_ops(old, new),
        *_definitions(old, new),
        *_cases(old, new),
        *_deployment(old, new),
    ]


def _items(old: Mapping, new: Mapping) -> Iterator[tuple[str, Any, Any]]:
    """(key, before, after) of everything that differs; None where it is missing."""
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _constants(identity: str, section: str, old: Contract, new: Contract) -> Iterator[Change]:
    for name, before, after in _items(old[section], new[section]):
        yield Change(identity, f"{section}.{name}: {readable(before)} -> {readable(after)}")


def _vocabulary(old: Contract, new: Contract) -> Iterator[Change]:
    before, after = old["vocabulary"], new["vocabulary"]
    if before != after:
        gone, come = sorted(set(before) - set(after)), sorted(set(after) - set(before))
        yield Change(
            SEMANTIC,
            f"the forward calls other ops: {len(before)} -> {len(after)} calls"
            + (f", without {', '.join(gone)}" if gone else "")
            + (f", with {', '.join(come)}" if come else ""),
        )


def _environment(old: Contract, new: Contract) -> Iterator[Change]:
    for name, before, after in _items(old["environment"], new["environment"]):
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted({*before, *after}):
                a, b = (side.get(key, "absent") for side in (before, after))
                if a != b:
                    yield Change(NUMERICAL, f"environment.{name} {key}: {a} -> {b}")
        else:
            yield Change(NUMERICAL, f"environment.{name}: {before} -> {after}")


def _ops(old: Contract, new: Contract) -> Iterator[Change]:
    for name, before, after in _items(old["ops"], new["ops"]):
        cases = ", ".join(_cases_of(name, old, new))
        if before is None or after is None:
            verb = "is new" if before is None else "is gone"
            yield Change(NUMERICAL, f"op {name} {verb} (in {cases})")
            continue
        for what in ("kernels", "arithmetic"):
            gone = sorted(set(before[what]) - set(after[what]))
            come = sorted(set(after[what]) - set(before[what]))
            if gone or come:
                parts = [f"without {', '.join(gone)}"] * bool(gone)
                parts += [f"with {', '.join(come)}"] * bool(come)
                yield Change(NUMERICAL, f"op {name}: other {what}: {'; '.join(parts)} (in {cases})")
        if before["source"] != after["source"]:
            yield Change(NUMERICAL, f"op {name}: its source changed (in {cases})")


def _cases_of(op: str, *contracts: Contract) -> list[str]:
    found = [
        case
        for contract in contracts
        for case, entry in contract["cases"].items()
        if op in _ops_of(entry)
    ]
    return sorted(set(found))


def _ops_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ops of a case; those of train_step are its update's."""
    return entry.get("ops") or entry.get("update", {}).get("ops", {})


def _definitions(old: Contract, new: Contract) -> Iterator[Change]:
    for name, before, after in _items(old["definitions"], new["definitions"]):
        verb = "is new" if before is None else "is gone" if after is None else "changed"
        kind = "kernel source" if name.startswith("pallas_kernels.") else "definition"
        yield Change(NUMERICAL, f"{kind} {name} {verb}")


def _cases(old: Contract, new: Contract) -> Iterator[Change]:
    for case, before, after in _items(old["cases"], new["cases"]):
        if before is None or after is None:
            yield Change(NUMERICAL, f"case {case} {'is new' if before is None else 'is gone'}")
            continue
        before, after = before.get("update", before), after.get("update", after)
        if before.get("between_ops") != after.get("between_ops"):
            yield Change(NUMERICAL, f"case {case}: other movement between ops, or other shapes")
        changed = [name for name, _, _ in _items(before["ops"], after["ops"])]
        if changed:
            yield Change(NUMERICAL, f"case {case}: other lowered text of {', '.join(changed)}")


def _deployment(old: Contract, new: Contract) -> Iterator[Change]:
    a, b = old["deployment"], new["deployment"]
    for module, _, _ in _items(a["tiles"], b["tiles"]):
        yield Change(DEPLOYMENT, f"tile table {module} changed")
    for mesh, before, after in _items(a["sizes"], b["sizes"]):
        if before is None or after is None:
            yield Change(DEPLOYMENT, f"mesh {mesh} is {'new' if before is None else 'gone'}")
            continue
        for name, x, y in _items(before, after):
            yield Change(DEPLOYMENT, f"mesh {mesh}: {name} {x} -> {y}")
    for mesh, before, after in _items(a["programs"], b["programs"]):
        if before and after:
            changed = ", ".join(case for case, _, _ in _items(before, after))
            yield Change(DEPLOYMENT, f"mesh {mesh}: other programs of {changed}")
