"""Build, show, compare and check execution contracts: `isojax contract VERB`.

build needs neither a device nor weights. The exit status of diff is 1 if a bit can move, that of
verify if this checkout no longer keeps the contract.
"""

import argparse
import json
import sys
from pathlib import Path

from isojax import config_io
from isojax.arguments import as_layout
from isojax.config import RunConfig
from isojax.contract import diff as differ
from isojax.contract.audit import findings
from isojax.contract.build import build
from isojax.contract.canonical import readable
from isojax.contract.contract import Contract, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs and their arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True)

    one = verbs.add_parser("build", help="compute a contract; needs no device and no weights")
    _config_arguments(one)
    one.add_argument("--output", "-o", required=True, type=Path, help="the file to write")
    one.set_defaults(verb_run=_build)

    one = verbs.add_parser("show", help="print what a contract says")
    one.add_argument("contract", type=Path, help="a contract file or a run folder")
    one.add_argument("--json", action="store_true", help="the canonical JSON itself")
    one.set_defaults(verb_run=_show)

    one = verbs.add_parser("diff", help="what moved between two contracts")
    one.add_argument("old", type=Path, help="a contract file or a run folder")
    one.add_argument("new", type=Path)
    one.set_defaults(verb_run=_diff)

    one = verbs.add_parser("verify", help="check a contract, and that this checkout still keeps it")
    one.add_argument("contract", type=Path, help="a contract file or a run folder")
    one.add_argument("--config", type=Path, help="settings (default: those beside the contract)")
    one.add_argument("--file-only", action="store_true", help="check the file alone, lower nothing")
    one.set_defaults(verb_run=_verify)

    one = verbs.add_parser("audit", help="list float arithmetic of the forward outside ops")
    _config_arguments(one)
    one.set_defaults(verb_run=_audit)


def run(arguments: argparse.Namespace) -> int:
    """Run a verb; its exit status.

    Raises:
      ContractError: what was read or asked for is refused.
      ConfigError: the settings are not those of a run.
    """
    return arguments.verb_run(arguments)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="settings of a run (TOML)")
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="default: cuda for mosaic kernels"
    )
    parser.add_argument("--device", help="compute capability (default sm_90)")
    parser.add_argument(
        "--mesh", action="append", type=as_layout, metavar="DxM",
        help="a mesh whose programs are recorded; may be repeated (default: the config's)",
    )  # fmt: skip


def _platform(arguments: argparse.Namespace, config: RunConfig) -> str:
    return arguments.platform or ("cuda" if config.policy.evaluation == "mosaic" else "cpu")


def _build(arguments: argparse.Namespace) -> int:
    config = config_io.load(arguments.config)
    contract = build(
        config,
        platform=_platform(arguments, config),
        device=arguments.device,
        meshes=arguments.mesh,
    )
    contract.save(arguments.output)
    print(f"{arguments.output}: numerical {contract.numerical}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    contract = load(arguments.contract)
    if arguments.json:
        sys.stdout.write(contract.to_bytes().decode())
    else:
        print(describe(contract))
    return 0


def describe(contract: Contract) -> str:
    """A contract for people."""
    env, model = contract["environment"], contract["model"]
    packages = ", ".join(f"{k} {v}" for k, v in env["packages"].items())
    flags = " ".join(f"{k}={v}" for k, v in env["xla_flags"].items())
    lines = [
        f"semantic    {contract.semantic}",
        f"numerical   {contract.numerical}",
        f"deployment  {contract.deployment}",
        "",
        f"{model['model_type']}, {model['num_layers']} layers, {len(contract['ops'])} ops, "
        f"{len(contract['definitions'])} definitions",
        f"{env['platform']} {env['device']}, {packages}",
        f"flags: {flags or 'none'}",
        "policy: " + ", ".join(f"{k} {readable(v)}" for k, v in contract["policy"].items()),
        "",
        "against train_score:",
    ]
    for case, found in contract["equivalence"].items():
        lines.append(f"  {case}: {found['proof']} ({found['calls']} calls)")
        by: dict[str, list[str]] = {}
        for op, proof in found.get("ops", {}).items():
            by.setdefault(proof, []).append(op)
        lines += [f"    {proof}: {', '.join(ops)}" for proof, ops in by.items()]
        if head := found.get("head"):
            ours, theirs = (" ".join(head[side]) for side in ("ops", "reference"))
            lines.append(f"    {head['proof']}: head {ours} against {theirs}")
    meshes = contract["claims"]["meshes"]
    admitted = " ".join(item["mesh"] for item in meshes if item["admitted"])
    lines += ["", f"admitted meshes: {admitted or 'none'}"]
    for state in contract["claims"]["states"]:
        lines.append(f"  {state['state']}: stale when {', '.join(state['invalidated_by'])}")
    lines.append("")
    for item in contract["evidence"] or [{}]:
        lines.append("evidence: " + (json.dumps(item, sort_keys=True) if item else "none yet"))
    return "\n".join(lines)


def _diff(arguments: argparse.Namespace) -> int:
    """Exit status 0: no bit can move; 1: it can."""
    old, new = load(arguments.old), load(arguments.new)
    changes = differ.diff(old, new)
    for change in changes:
        print(change)
    if not changes:
        print("no difference")
    return int(old.numerical != new.numerical)


def _verify(arguments: argparse.Namespace) -> int:
    path: Path = arguments.contract
    pinned = load(path)
    if arguments.file_only:
        print(f"{path}: whole, numerical {pinned.numerical}")
        return 0
    config_path = arguments.config or _config_beside(path)
    env = pinned["environment"]
    now = build(
        config_io.load(config_path),
        platform=env["platform"],
        device=env["device"],
        meshes=(),
    )
    for change in differ.diff(pinned, now):
        if change.identity != differ.DEPLOYMENT:
            print(change)
    if pinned.numerical == now.numerical:
        print(f"{path}: kept, numerical {pinned.numerical}")
        return 0
    print(f"{path}: broken, numerical {pinned.numerical} -> {now.numerical}", file=sys.stderr)
    return 1


def _config_beside(path: Path) -> Path:
    """Settings of a run folder, or ``x.toml`` beside ``x.contract.json``."""
    if path.is_dir():
        return path / "config.toml"
    beside = path.with_name(path.name.replace(".contract.json", ".toml"))
    return beside if beside != path else path.with_name("config.toml")


def _audit(arguments: argparse.Namespace) -> int:
    config = config_io.load(arguments.config)
    found = findings(config, _platform(arguments, config), arguments.mesh or [config.mesh])
    for line in found:
        print(line)
    if not found:
        print("every float of the forward is computed inside an op")
    return int(bool(found))
