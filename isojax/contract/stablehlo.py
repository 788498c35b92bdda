"""A lowered program in canonical form: no locations, no names that a process or a checkout chose.

A function's digest is that of its text with the digests of the functions it calls in place of their
names. A Mosaic kernel travels as bytecode inside its call; it is parsed, printed without locations
and stands in the text as the digest of that.
"""

import dataclasses
import re
from typing import Any

from jaxlib.mlir import ir

from isojax.contract.canonical import ContractError, digest
from isojax.ops.op import PREFIX, is_op

_FUNCTION = re.compile(r"^  func\.func (?:public |private )?@([\w.$-]+)", re.MULTILINE)
_CALL = re.compile(r"@([\w.$-]+)")
_CONFIG = "mhlo.backend_config"  # of a Mosaic call: the kernel and its hash
_OUTPUT = re.compile(r' \{jax\.result_info = "[^"]*"\}|jax\.result_info = "[^"]*",? ?')
# an integer of its own: not part of a name, of a float or of a hexadecimal blob
_NUMBER = re.compile(r"(?<![\w.%#@$-])-?\d+(?![\w.])")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Mosaic kernel: its name, sha256 of its location-free module, its arithmetic."""

    name: str
    module: str
    arithmetic: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Function:
    """One function of a program.

    text: canonical, callees by digest. digest: of the text. kernels: in it and in what it calls.
    arithmetic: floating-point instructions, by name and type, in it and in what it calls.
    """

    name: str
    text: str
    digest: str
    kernels: tuple[Kernel, ...]
    arithmetic: frozenset[str]

    @property
    def op(self) -> str | None:
        """The op that it is a call of, if any."""
        return op_name(self.name)


def op_name(function: str) -> str | None:
    """``iso_rms_norm_17`` -> ``rms_norm``; None for a function that is no op."""
    if not is_op(function):
        return None
    return re.sub(r"_\d+$", "", function[function.index(PREFIX) + len(PREFIX) :])


class Program:
    """A lowered jit program.

    lowered: what `jax.jit(f).trace(...).lower(...)` gave.
    """

    def __init__(self, lowered: Any) -> None:
        # a copy: the original may yet be compiled
        self.module = lowered.compiler_ir("stablehlo").operation.clone()
        self._kernels = _name_kernels(self.module)
        text = _OUTPUT.sub("", self.module.operation.get_asm(enable_debug_info=False))
        starts = [*_FUNCTION.finditer(text)]
        # the module's own brace would make its last function another one
        ends = [*(match.start() for match in starts[1:]), text.rindex("}")]
        self._raw = {
            match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)
        }
        if len(starts) != text.count("  func.func "):
            raise ContractError("a function of the program has a name that is not understood")
        self._calls: dict[str, list[str]] = {}
        self._functions: dict[str, Function] = {}

    def __getitem__(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = self._canonical(name)
        return self._functions[name]

    @property
    def digest(self) -> str:
        """Of the whole program, its shapes, shardings and kernels included."""
        return self["main"].digest

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self["main"].kernels

    def calls(self, name: str) -> list[str]:
        """Functions that a function calls, in order of their first mention."""
        if name not in self._calls:
            seen = dict.fromkeys(_CALL.findall(self._raw[name]))
            self._calls[name] = [at for at in seen if at in self._raw and at != name]
        return self._calls[name]

    def expanded(self, name: str) -> str:
        """Text of a function and of all that it calls, functions named by their order.

        Equal functions are one, however many copies jax made of them: that depends on what its
        trace caches held.
        """
        order: dict[str, int] = {}
        texts: list[str] = []

        def symbol(match: re.Match[str]) -> str:
            return f"@f{order[self[match[1]].digest]}" if match[1] in self._raw else match[0]

        def visit(at: str) -> None:
            order[self[at].digest] = len(order)
            for callee in self.calls(at):
                if self[callee].digest not in order:
                    visit(callee)
            texts.append(_CALL.sub(symbol, self._raw[at]))

        visit(name)
        return "".join(texts)

    def _canonical(self, name: str) -> Function:
        callees = {callee: self[callee] for callee in self.calls(name)}
        kernels = [kernel for callee in callees.values() for kernel in callee.kernels]
        arithmetic = frozenset().union(*(callee.arithmetic for callee in callees.values()))

        def symbol(match: re.Match[str]) -> str:
            if match[1] == name:
                return "@self"
            return f"@{callees[match[1]].digest}" if match[1] in callees else match[0]

        raw = self._raw[name]
        kernels += [self._kernels[shown] for shown in _SHOWN.findall(raw)]
        text = _CALL.sub(symbol, raw)
        arithmetic |= _stablehlo_arithmetic(text)
        arithmetic |= frozenset().union(*(k.arithmetic for k in kernels))
        unique = tuple(dict.fromkeys(kernels))
        return Function(name, text, digest(text), unique, arithmetic)


_SHOWN = re.compile(r'mhlo\.backend_config = \{kernel = "([^"]*)"')


def _name_kernels(module: Any) -> dict[str, Kernel]:
    """Put a kernel's name and digest in the place of its bytecode, everywhere in a module.

    Returns the kernels by what stands for them.
    """
    found: dict[str, Kernel] = {}

    def visit(op: Any) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and _CONFIG in op.attributes:
            config = op.attributes[_CONFIG]
            if isinstance(config, ir.DictAttr) and "kernel_hash" in config:
                items = (config[i] for i in range(len(config)))
                fields = {item.name: item.attr for item in items}
                key = ir.StringAttr(fields.pop("kernel_hash")).value_bytes
                here = _kernel(key, ir.StringAttr(fields.pop("module")))
                shown = f"{here.name} {here.module}"
                found[shown] = here
                fields["kernel"] = ir.StringAttr.get(shown)
                op.attributes[_CONFIG] = ir.DictAttr.get(fields)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


_READ: dict[bytes, Kernel] = {}  # by sha256 of the bytecode


def _kernel(key: bytes, module: ir.StringAttr) -> Kernel:
    if key not in _READ:
        _READ[key] = read_kernel(module.value_bytes)
    return _READ[key]


def read_kernel(bytecode: bytes) -> Kernel:
    """The kernel in a Mosaic call's payload."""
    with _context():
        operation = ir.Module.parse(bytecode).operation
        text = str(operation.get_asm(enable_debug_info=False))
    text = re.sub(r', mosaic_gpu\.dump_basename = "[^"]*"', "", text)
    name = re.search(r"^module @([\w.$-]+)", text, re.MULTILINE)
    return Kernel(name[1] if name else "kernel", digest(text), _mosaic_arithmetic(text))


def _context() -> ir.Context:
    """A context that reads serialised Mosaic kernels (their dialect is opaque on purpose)."""
    from jax._src.interpreters import mlir  # the public API offers no context with jax's dialects
    from jax.experimental.mosaic.gpu import dialect

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    return context


_FLOAT = re.compile(r"(?:(?<=\dx)|(?<!\w))(bf16|f16|f32|f64|f8\w+)\b")
_HLO_OP = re.compile(r"\b(stablehlo|chlo)\.(\w+)")
_MOVES = frozenset(
    """all_gather all_to_all bitcast_convert broadcast broadcast_in_dim collective_permute compare
    concatenate constant custom_call dynamic_slice dynamic_update_slice gather iota
    optimization_barrier pad reshape return reverse scatter select slice sort transpose tuple while
    case if""".split()
)


def _stablehlo_arithmetic(text: str) -> frozenset[str]:
    """``stablehlo.add f32``: instructions of the text that compute floats."""
    found = set()
    for line in text.splitlines():
        types = _FLOAT.findall(line.rpartition(" : ")[2])
        if types:
            for dialect, name in _HLO_OP.findall(line):
                if name not in _MOVES:
                    found.add(f"{dialect}.{name} {'->'.join(dict.fromkeys(types))}")
    return frozenset(found)


_MOSAIC_OP = re.compile(
    r'"stable_mosaic_gpu\.((?:arith\.\w*f|math\.\w+|vector\.(?:reduction|fma|contract)|nvvm\.wgmma\w*)'
    r"|arith\.(?:ext|trunc)f|arith\.[su]itofp|arith\.fpto[su]i)\""
)
_CONSTANT = re.compile(
    r'"stable_mosaic_gpu\.arith\.constant"\(\) \{value = (\S+ : (?:bf16|f16|f32|f64))\}'
)
_FASTMATH = re.compile(r"fastmath<([^>]*)>")
_INSTRUCTION = re.compile(
    r"\b((?:wgmma\.mma_async|mma|ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos|fma|mul|add|sub|cvt|min|max|abs|neg)"
    r"\.[a-z0-9_.:]*(?:f32|f16|bf16|tf32|e4m3|e5m2)[a-z0-9_.]*)"
)


def _mosaic_arithmetic(text: str) -> frozenset[str]:
    """Floating-point instructions and constants of a kernel, tile sizes aside."""
    found = set()
    for line in text.splitlines():
        operation = _MOSAIC_OP.search(line)
        constant = _CONSTANT.search(line)
        if constant:
            found.add(f"constant {constant[1]}")
        elif operation:
            types = dict.fromkeys(_FLOAT.findall(line))
            mode = _FASTMATH.search(line)
            found.add(f"{operation[1]} {'->'.join(types)}" + (f" {mode[1]}" if mode else ""))
        elif "llvm.inline_asm" in line:
            for instruction in _INSTRUCTION.findall(line):
                found.add("ptx " + re.sub(r"\.m\d+n\d+(?=k)", "", instruction))
    return frozenset(found)


def numbers(text: str) -> tuple[list[str], list[int]]:
    """Text apart from its integers, and the integers: dimensions, bounds, strides, constants.

    Shapes ``8x16xf32`` are opened first, so that every dimension is an integer of its own.
    """
    opened = re.sub(r"(?<=tensor<)[\dx?]+x(?=[a-z])", lambda m: m[0].replace("x", ", "), text)
    return _NUMBER.split(opened), [int(n) for n in _NUMBER.findall(opened)]
