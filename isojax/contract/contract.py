"""The contract as a document: canonical JSON that cannot be edited unnoticed."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from isojax.contract.canonical import ContractError, digest, dumps

FORMAT, VERSION = "isojax-contract", 1
FILE_NAME = "contract.json"

# sections that each identity is the digest of
SEMANTIC = ("model", "vocabulary")
NUMERICAL = (
    "model",
    "vocabulary",
    "policy",
    "training",
    "environment",
    "definitions",
    "ops",
    "cases",
)
DEPLOYMENT = ("deployment",)
SECTIONS = (*NUMERICAL, *DEPLOYMENT, "equivalence", "claims", "evidence")
_KEYS = {"format", "version", "identities", "digest", *SECTIONS}


@dataclasses.dataclass(frozen=True)
class Contract:
    """An execution contract.

    sections: the document's sections by name, JSON values without floats; see docs/contract.md.
    """

    sections: Mapping[str, Any]

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]

    @property
    def semantic(self) -> str:
        """Which model it is: architecture and the ops it is made of."""
        return self._identity(SEMANTIC)

    @property
    def numerical(self) -> str:
        """Everything that can move a bit; the key that rollouts, trainer and checkpoints share."""
        return self._identity(NUMERICAL)

    @property
    def deployment(self) -> str:
        """Shapes, tiles, meshes and programs; recorded, never required to match."""
        return self._identity(DEPLOYMENT)

    def _identity(self, names: tuple[str, ...]) -> str:
        return digest({name: self.sections[name] for name in names})

    def with_evidence(self, item: Mapping[str, Any]) -> "Contract":
        """The contract with one more piece of evidence; its identities stay."""
        sections = dict(self.sections)
        sections["evidence"] = [*sections["evidence"], dict(item)]
        return Contract(sections)

    def document(self) -> dict[str, Any]:
        """The whole document, identities and its own digest included."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "identities": {
                "semantic": self.semantic,
                "numerical": self.numerical,
                "deployment": self.deployment,
            },
            **{name: self.sections[name] for name in SECTIONS},
        }
        return {**body, "digest": digest(body)}

    def to_bytes(self) -> bytes:
        """Canonical JSON; `from_bytes` gives it back byte for byte."""
        return dumps(self.document())

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(self.to_bytes())
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)


def load(path: str | Path) -> Contract:
    """Read a contract file, or the one in a run folder.

    Raises:
      ContractError: if there is none, or it is truncated, edited or of an unknown version.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}") from None
    try:
        return from_bytes(data)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from None


def from_bytes(data: bytes) -> Contract:
    """The inverse of `Contract.to_bytes`.

    Raises:
      ContractError: see `load`.
    """

    def no_floats(text: str) -> Any:
        raise ContractError(f"{text} is a decimal float, which no contract holds: it was edited")

    try:
        document = json.loads(data, parse_float=no_floats, parse_constant=no_floats)
    except ContractError:
        raise
    except ValueError as error:
        raise ContractError(
            f"not a whole JSON file ({error}): it was truncated or edited"
        ) from None
    contract = from_document(document)
    if contract.to_bytes() != data:
        raise ContractError("its bytes are not canonical: it was edited or reformatted")
    return contract


def from_document(document: Any) -> Contract:
    """The inverse of `Contract.document`: from a checkpoint's metadata, say.

    Raises:
      ContractError: see `load`.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ContractError(f"not an execution contract (format is not {FORMAT!r})")
    if document.get("version") != VERSION:
        raise ContractError(
            f"version {document.get('version')!r} is unknown; this isojax reads version {VERSION}"
        )
    if set(document) != _KEYS:
        wrong = sorted(set(document) ^ _KEYS)
        raise ContractError(f"sections missing or unknown: {', '.join(wrong)}: it was edited")
    body = {key: value for key, value in document.items() if key != "digest"}
    if digest(body) != document["digest"]:
        raise ContractError("its digest is not that of its contents: it was edited")
    contract = Contract({name: document[name] for name in SECTIONS})
    if contract.document()["identities"] != document["identities"]:
        raise ContractError("its identities are not those of its sections: it was edited")
    return contract


def schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    text = resources.files("isojax.contract").joinpath("schema.json").read_text(encoding="utf-8")
    return json.loads(text)
