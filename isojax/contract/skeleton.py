"""What a program does with floats between its ops: the calls, and the movement that joins them.

The program is read as dataflow from `main`, helper functions opened, op calls left whole. Integers
(addresses, masks, counters) do not appear: they say where a number lies, not what it is. The pools
that sequences leave behind appear as `cache`, whatever their number of layers. A value is named by
the order of its appearance, and movement that no op call reads is left out. Two cases with equal
text call the same ops on the same rows, in the same order.
"""

import dataclasses
from typing import Any

from isojax.contract.stablehlo import Program, op_name

_CACHE = "cache"
_INT = "int"
_SKIPPED_ATTRIBUTES = ("mhlo.sharding", "sdy.sharding", "sdy.sharding_per_value", "api_version")


@dataclasses.dataclass(frozen=True)
class Value:
    """A float of the walk: its number, its type, and whether it depends on a weight.

    name: of an argument of `main`; other values are named when the text is written.
    """

    number: int
    type: str
    weighted: bool
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op: its name, the function called, whether it depends on a weight."""

    op: str
    function: str
    weighted: bool


@dataclasses.dataclass
class _Line:
    """One step: its text around the operands, what it reads and makes."""

    head: str
    reads: list[Any]
    makes: list[Value]
    body: "list[_Line] | None" = None
    yields: list[Any] | None = None
    arguments: list[Value] | None = None


class Skeleton:
    """The walk of one program.

    pool_dims: sizes of the second axis of the pools (pages and slots). weights: how many of main's
    first arguments are weights.
    """

    def __init__(self, program: Program, pool_dims: tuple[int, ...], weights: int) -> None:
        self._functions = {
            op.attributes["sym_name"].value: op
            for op in program.module.body.operations
            if op.operation.name == "func.func"
        }
        self._pool_dims = pool_dims
        self._count = 0
        self.calls: list[Call] = []
        main = self._functions["main"].body.blocks[0]
        env = {}
        for index, argument in enumerate(main.arguments):
            value = self._value(str(argument.type), index < weights)
            if isinstance(value, Value):
                kind = f"weight{index}" if index < weights else f"input{index - weights}"
                value = dataclasses.replace(value, name=f"%{kind}")
            env[argument] = value
        self._lines: list[_Line] = []
        self._block(main, env, self._lines, record=True)

    def forward(self, until: tuple[str, ...]) -> tuple[str, list[Call]]:
        """Text and op calls up to the first call of an op of `until`."""
        calls = []
        for call in self.calls:
            if call.op in until:
                break
            calls.append(call)
        lines = []
        for line in self._lines:
            if any(line.head == f"call {name}" for name in until):
                break
            lines.append(line)
        return _render(lines), calls

    # ------------------------------------------------------------------ walk

    def _value(self, type_: str, weighted: bool) -> Any:
        shape, dtype = _shape(type_)
        if not dtype or dtype[0] not in "bf":
            return _INT
        if len(shape) > 3 and shape[1] in self._pool_dims:
            return _CACHE
        self._count += 1
        return Value(self._count, type_, weighted)

    def _block(self, block: Any, env: dict, lines: list[_Line], record: bool) -> list[Any]:
        """Walk a block; what its terminator returns."""
        for op in block.operations:
            name = op.operation.name
            operands = [env[v] for v in op.operands]
            if name in ("func.return", "stablehlo.return", "sdy.return"):
                return operands
            if name in ("func.call", "call"):
                results = self._call(op, operands, lines, record)
            elif name == "stablehlo.while":
                results = self._while(op, operands, env, lines, record)
            elif name in ("sdy.manual_computation", "stablehlo.optimization_barrier"):
                results = self._inline(op, operands, env, lines, record)
            else:
                results = self._step(op, name, operands, lines)
            env.update(zip(op.results, results, strict=True))
        return []

    def _results(self, op: Any, operands: list[Any]) -> list[Any]:
        weighted = any(isinstance(v, Value) and v.weighted for v in operands)
        return [self._value(str(result.type), weighted) for result in op.results]

    def _step(self, op: Any, name: str, operands: list[Any], lines: list[_Line]) -> list[Any]:
        if name == "stablehlo.constant":
            made = self._results(op, operands)
            if isinstance(made[0], Value):
                lines.append(_Line(f"constant {op.attributes['value']}", [], made))
            return made
        made = self._results(op, operands)
        floats = [v for v in (*operands, *made) if isinstance(v, Value)]
        if floats:
            lines.append(_Line(f"{name}{_attributes(op)}", operands, made))
        return made

    def _call(self, op: Any, operands: list[Any], lines: list[_Line], record: bool) -> list[Any]:
        callee = op.attributes["callee"].value
        name = op_name(callee)
        if name is None:
            block = self._functions[callee].body.blocks[0]
            inner = dict(zip(block.arguments, operands, strict=True))
            return self._block(block, inner, lines, record)
        made = self._results(op, operands)
        if record:
            weighted = any(isinstance(v, Value) and v.weighted for v in operands)
            self.calls.append(Call(name, callee, weighted))
        lines.append(_Line(f"call {name}", operands, made))
        return made

    def _inline(self, op: Any, operands: list, env: dict, lines: list, record: bool) -> list[Any]:
        if not op.regions:
            return operands  # a barrier hands its operands on
        block = op.regions[0].blocks[0]
        return self._block(
            block, {**env, **dict(zip(block.arguments, operands, strict=True))}, lines, record
        )

    def _while(self, op: Any, operands: list, env: dict, lines: list, record: bool) -> list[Any]:
        block = op.regions[1].blocks[0]
        weighted = [isinstance(v, Value) and v.weighted for v in operands]
        while True:  # a carry is weighted when a body makes it so
            start = self._count
            carried = [
                self._value(str(a.type), w) for a, w in zip(block.arguments, weighted, strict=True)
            ]
            trial = {**env, **dict(zip(block.arguments, carried, strict=True))}
            after = self._block(block, trial, [], record=False)
            grown = [
                w or (isinstance(v, Value) and v.weighted)
                for w, v in zip(weighted, after, strict=True)
            ]
            self._count = start
            if grown == weighted:
                break
            weighted = grown
        carried = [
            self._value(str(a.type), w) for a, w in zip(block.arguments, weighted, strict=True)
        ]
        body: list[_Line] = []
        inner = {**env, **dict(zip(block.arguments, carried, strict=True))}
        yields = self._block(block, inner, body, record)
        made = [self._value(str(r.type), w) for r, w in zip(op.results, weighted, strict=True)]
        if any(isinstance(v, Value) for v in made):
            lines.append(_Line("while", operands, made, body, yields, carried))
        return made


def _shape(type_: str) -> tuple[list[int], str]:
    """``tensor<8x16xf32>`` -> ([8, 16], "f32"); ("", [] for anything else)."""
    if not type_.startswith("tensor<"):
        return [], ""
    *dims, dtype = type_[7:-1].split("x")
    return [int(d) for d in dims if d.isdigit()], dtype


def _attributes(op: Any) -> str:
    kept = sorted(
        f"{name} = {op.attributes[name]}"
        for name in op.attributes
        if name not in _SKIPPED_ATTRIBUTES
    )
    return " {" + ", ".join(kept) + "}" if kept else ""


# ------------------------------------------------------------------ text


def _render(lines: list[_Line]) -> str:
    """Lines that an op call needs, values named in order of appearance."""
    needed = _needed(lines, set())
    names: dict[int, str] = {}

    def name(value: Any) -> str:
        if not isinstance(value, Value):
            return value
        return value.name or names.setdefault(value.number, f"%{len(names)}")

    out: list[str] = []

    def emit(lines: list[_Line], indent: str) -> None:
        for line in lines:
            if id(line) not in needed:
                continue
            if line.body is None:
                reads = ", ".join(name(v) for v in line.reads if v != _INT)
                types = ", ".join(getattr(v, "type", str(v)) for v in line.makes)
                made = ", ".join(name(v) for v in line.makes)
                out.append(f"{indent}{made} = {line.head} ({reads}) : {types}")
                continue
            assert line.arguments is not None and line.yields is not None
            kept = [i for i, v in enumerate(line.makes) if (id(line), i) in needed]
            pick = lambda items: ", ".join(name(items[i]) for i in kept)  # noqa: B023, E731
            reads = pick(line.reads)
            out.append(f"{indent}while {pick(line.arguments)} from {reads}:")
            emit(line.body, indent + "  ")
            out.append(f"{indent}  again {pick(line.yields)}")
            out.append(f"{indent}gives {pick(line.makes)}")

    emit(lines, "")
    return "\n".join(out) + "\n"


def _needed(lines: list[_Line], wanted: set[int]) -> set:
    """Identities of the lines to show, and (line, carry) of the carries."""
    needed: set = set()

    def visit(lines: list[_Line], wanted: set[int]) -> bool:
        has_call = False
        for line in reversed(lines):
            makes = {v.number for v in line.makes if isinstance(v, Value)}
            if line.body is None:
                if not (line.head.startswith("call ") or makes & wanted):
                    continue
                has_call |= line.head.startswith("call ")
                needed.add(id(line))
                wanted |= {v.number for v in line.reads if isinstance(v, Value)}
                continue
            assert line.arguments is not None and line.yields is not None
            kept = {
                i for i, v in enumerate(line.makes) if isinstance(v, Value) and v.number in wanted
            }
            while True:  # a carry is kept when a kept carry or a call of the body reads it
                inner = {line.yields[i].number for i in kept if isinstance(line.yields[i], Value)}
                called = visit(line.body, inner)
                more = kept | {
                    i
                    for i, v in enumerate(line.arguments)
                    if isinstance(v, Value) and v.number in inner
                }
                if more == kept:
                    break
                kept = more
            if called or makes & wanted:
                has_call |= called
                needed.add(id(line))
                needed.update((id(line), i) for i in kept)
                wanted |= {line.reads[i].number for i in kept if isinstance(line.reads[i], Value)}
        return has_call

    visit(lines, wanted)
    return needed
