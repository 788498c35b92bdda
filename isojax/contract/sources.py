"""Digests of the source that an op or a kernel is made of, down to the last helper it can reach.

The unit is a top-level definition of a module. Its text is its syntax tree, written the same by
every Python: comments, layout, docstrings, annotations and the wording of errors are gone. Its
dependencies are all the names in it that lead to other definitions of the same packages,
annotations included: the closure is rather too large than too small, but what a string picks at run
time escapes it.
"""

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isojax.contract.canonical import ContractError, digest

PACKAGES = ("isojax", "pallas_kernels")

# Modules whose contents cannot move a bit (law 8: tiling is free); they belong to the deployment.
DEPLOYMENT = ("pallas_kernels.tuning", "pallas_kernels.tuning_table")

_WHOLE = "*"  # what a module does at import, beside defining names


@dataclasses.dataclass(frozen=True, order=True)
class Symbol:
    """A top-level definition: dotted module, and the name in it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def package_folders() -> dict[str, Path]:
    """Where the installed packages lie."""
    folders = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ContractError(f"package {package} is not installed")
        folders[package] = Path(spec.submodule_search_locations[0])
    return folders


class Sources:
    """The definitions of some packages, read from files and never imported."""

    def __init__(self, folders: Mapping[str, Path] | None = None) -> None:
        self._folders = dict(package_folders() if folders is None else folders)
        self._modules: dict[str, _Module | None] = {}

    def closure(self, roots: Iterable[Symbol]) -> dict[str, str]:
        """{definition: sha256 of its normalised text} for `roots` and all that they reach.

        Raises:
          ContractError: if a root is not defined where it is said to be.
        """
        found: dict[Symbol, str] = {}
        queue = list(roots)
        for root in queue:
            module = self._module(root.module)
            if module is None or root.name not in module.definitions:
                raise ContractError(f"no source found for {root}")
        while queue:
            symbol = queue.pop()
            if symbol in found or symbol.module in DEPLOYMENT:
                continue
            text, reached = self._definition(symbol)
            found[symbol] = digest(text)
            queue += reached
        return {str(symbol): found[symbol] for symbol in sorted(found)}

    def deployment(self) -> dict[str, str]:
        """{name: sha256} of what only chooses tiles: modules, and JSON tables beside kernels."""
        names = [name for name in DEPLOYMENT if self._path(name) is not None]
        found = {name: digest(_normalised(self._parse(name).body)) for name in names}
        kernels = self._folders.get("pallas_kernels")
        tables = sorted(kernels.glob("*.json")) if kernels else []
        return found | {f"pallas_kernels/{path.name}": digest(path.read_bytes()) for path in tables}

    def everything(self) -> str:
        """sha256 of the normalised text of every module of the packages."""
        texts = {}
        for package, folder in self._folders.items():
            for path in sorted(folder.rglob("*.py")):
                tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
                texts[f"{package}/{path.relative_to(folder).as_posix()}"] = _normalised(tree.body)
        return digest(texts)

    def _path(self, name: str) -> Path | None:
        package, *rest = name.split(".")
        if package not in self._folders:
            return None
        base = self._folders[package].joinpath(*rest)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def _parse(self, name: str) -> ast.Module:
        path = self._path(name)
        assert path is not None
        return ast.parse(path.read_text(encoding="utf-8"), str(path))

    def _module(self, name: str) -> "_Module | None":
        if name not in self._modules:
            self._modules[name] = None if self._path(name) is None else _Module(self._parse(name))
        return self._modules[name]

    @functools.cache  # noqa: B019 (one short-lived object)
    def _definition(self, symbol: Symbol) -> tuple[str, tuple[Symbol, ...]]:
        module = self._module(symbol.module)
        assert module is not None
        statements = module.definitions[symbol.name]
        imports = dict(module.imports)
        for statement in statements:
            imports |= _imports(statement)
        reached: set[Symbol] = set()
        for chain in (c for statement in statements for c in _chains(statement)):
            reached |= self._resolve(symbol.module, chain, module, imports)
        if module.definitions.get(_WHOLE):
            reached.add(Symbol(symbol.module, _WHOLE))
        reached.discard(symbol)
        return _normalised(statements), tuple(sorted(reached))

    def _resolve(
        self, here: str, chain: tuple[str, ...], module: "_Module", imports: Mapping[str, str]
    ) -> set[Symbol]:
        """What a dotted name leads to."""
        head = chain[0]
        if head in imports:
            return self._follow((*imports[head].split("."), *chain[1:]))
        return {Symbol(here, head)} if head in module.definitions else set()

    def _follow(self, dotted: tuple[str, ...]) -> set[Symbol]:
        """The definition at an absolute dotted name, through re-exports; all of a bare module."""
        for end in range(len(dotted), 0, -1):
            name = ".".join(dotted[:end])
            module = self._module(name)
            if module is None:
                continue
            if end == len(dotted):
                return {Symbol(name, n) for n in module.definitions}
            attribute = dotted[end]
            if attribute in module.definitions:
                return {Symbol(name, attribute)}
            if attribute in module.imports:
                return self._follow((*module.imports[attribute].split("."), *dotted[end + 1 :]))
            return set()
        return set()


class _Module:
    """A parsed module: its definitions by name, and what its imported names stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, str] = {}
        self.definitions: dict[str, list[ast.stmt]] = {}
        for index, statement in enumerate(tree.body):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.imports |= _imports(statement)
            elif not (index == 0 and _is_docstring(statement)):
                for name in _defines(statement):
                    self.definitions.setdefault(name, []).append(statement)
        for statement in tree.body:
            for name in _registers(statement):
                if name in self.definitions:
                    self.definitions[name].append(statement)


def _defines(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement belongs to; `f.defvjp(...)` belongs to f."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Expr(value=ast.Call(func=function)):
            while isinstance(function, ast.Attribute):
                function = function.value
            return [function.id] if isinstance(function, ast.Name) else [_WHOLE]
    stored = [
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return sorted(set(stored)) or [_WHOLE]


def _registers(statement: ast.stmt) -> list[str]:
    """The names that a function is decorated by a method of: ``@f.defjvp`` makes it a part of f."""
    found = []
    for decorator in getattr(statement, "decorator_list", ()):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            found.append(target.value.id)
    return found


def _imports(root: ast.AST) -> dict[str, str]:
    """{local name: absolute dotted name} of all imports inside `root`."""
    found = {}
    for node in ast.walk(root):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
                else:
                    found[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ContractError("relative imports hide a source from the contract")
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _chains(root: ast.AST) -> Iterator[tuple[str, ...]]:
    """Every dotted name in `root`, longest form only: ``a.b.c`` -> ("a", "b", "c")."""
    stack: list[ast.AST] = [root]
    while stack:
        node = stack.pop()
        names: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield (inner.id, *reversed(names))
        else:
            stack.extend(ast.iter_child_nodes(inner if names else node))


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _normalised(statements: list[ast.stmt]) -> str:
    return "\n".join(_text(statement) for statement in statements)


# of a statement, what no number depends on
_SILENT = {
    ast.arg: ("annotation",),
    ast.FunctionDef: ("returns",),
    ast.AsyncFunctionDef: ("returns",),
    ast.AnnAssign: ("annotation",),
    ast.Raise: ("exc", "cause"),
    ast.Constant: ("kind",),
}
_HOLDERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _text(node: Any) -> str:
    """A syntax tree in one line; fields that are empty, as new ones of a later Python, are left
    out."""
    if isinstance(node, list):
        return f"[{' '.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    silent = _SILENT.get(type(node), ())
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, _HOLDERS) and _is_docstring(value[0]):
            value = value[1:]
        if name not in silent and (value or value not in (None, [])):
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({' '.join(fields)})"
