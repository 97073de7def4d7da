"""What a piece of compiled Python code is, and which names it uses.

Bytecode is read, not source text: it is what runs, while a source file may have changed since it was
imported. Line numbers, file names and comments are no part of it.
"""

from __future__ import annotations

import opcode
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch2ort.cache._atoms import atom, form

_GLOBAL_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE_NAMES = ("LOAD_ATTR", "LOAD_METHOD")
# Low bits of an opcode's argument that are flags, and not part of the index of a name.
_FLAG_BITS = {
    "LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_SUPER_ATTR": 2,
}


def _codes(*names: str) -> set[int]:
    return {opcode.opmap[name] for name in names if name in opcode.opmap}


_SHIFTS = {
    opcode.opmap[name]: _FLAG_BITS.get(name, 0)
    for name in (*_GLOBAL_NAMES, *_ATTRIBUTE_NAMES, "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM")
    if name in opcode.opmap
}
_GLOBALS = _codes(*_GLOBAL_NAMES)
_ATTRIBUTES = _codes(*_ATTRIBUTE_NAMES)
_ONE_VALUE = _GLOBALS | _codes("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_IMPORT, _IMPORT_FROM = opcode.opmap["IMPORT_NAME"], opcode.opmap["IMPORT_FROM"]
_CONSTANT = opcode.opmap["LOAD_CONST"]
_MATCH_CLASS = opcode.opmap["MATCH_CLASS"]
_CALLS = _codes("CALL", "PRECALL", "CALL_FUNCTION")
_EXTENDED = opcode.EXTENDED_ARG
_CACHE = opcode.opmap.get("CACHE")

# With these, code can read an attribute whose name stands nowhere in it.
_REFLECTION = frozenset({"vars", "dir", "__dict__", "attrgetter", "methodcaller", "__getattribute__"})


@dataclass
class Uses:
    """Names that a piece of code uses, in a fixed order.

    Attributes:
        chains: ``("torch", "nn", "functional")`` for ``torch.nn.functional``: a global variable and the
            attributes that are read from it at once.
        imports: modules that the code itself imports, with a dot in front for each level of a relative
            import -> the names that it takes from them.
        names: every attribute and global, and every string that ``getattr`` could be given.
        any_name: whether the code may read an attribute whose name is made while it runs.
    """

    chains: dict[tuple[str, ...], None] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    any_name: bool = False


def uses_of(code: CodeType) -> Uses:
    """The names that ``code`` uses, with those of the functions, classes and lambdas inside it."""
    uses = Uses()
    for part in _with_nested(code):
        _read(part, uses)
    uses.any_name = uses.any_name or not _REFLECTION.isdisjoint(uses.names)
    return uses


def code_bytes(code: CodeType) -> bytes:
    """Equal bytes if and only if two pieces of code do the same with the same values."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = [form(b"b", code.co_code), form(b"b", getattr(code, "co_exceptiontable", b""))]
    parts += [_constant(value) for value in (*counts, *names, *code.co_consts)]
    return form(b"C", b"".join(parts))


def _constant(value: Any) -> bytes:
    known = code_bytes(value) if isinstance(value, CodeType) else atom(value)
    assert known is not None, f"a constant of type {type(value)} in compiled code"
    return known


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _read(code: CodeType, uses: Uses) -> None:
    uses.names.update(code.co_names)
    uses.names.update(_identifiers(code.co_consts))
    operations = _operations(code.co_code)
    chain: tuple[str, ...] = ()
    taken: list[str] = []
    for position, (operation, argument) in enumerate(operations):
        shift = _SHIFTS.get(operation)
        name = "" if shift is None else code.co_names[argument >> shift]
        if chain:
            if operation in _ATTRIBUTES:
                chain = (*chain, name)
                continue
            uses.chains[chain] = None
            chain = ()
        if operation in _GLOBALS:
            chain = (name,)
            if name in ("getattr", "hasattr") and not _gets_constant(
                operations[position + 1 :], code.co_consts
            ):
                uses.any_name = True
        elif operation == _IMPORT:
            level = _pushed_number(operations[position - 2], code.co_consts)
            names = uses.imports.setdefault("." * level + name, [])
            # `import a.b as c` has no list of names; what it takes is the module itself.
            taken = names if code.co_consts[operations[position - 1][1]] is not None else []
        elif operation == _IMPORT_FROM:
            taken.append(name)
        elif operation == _MATCH_CLASS:
            uses.any_name = True  # positions of a pattern are names that the class says
    if chain:
        uses.chains[chain] = None


def _identifiers(constants: Sequence[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str and constant.isidentifier():
            yield constant
        elif type(constant) is tuple:
            yield from _identifiers(constant)


def _pushed_number(operation: tuple[int, int], constants: Sequence[Any]) -> int:
    code, argument = operation
    return int(constants[argument]) if code == _CONSTANT else argument


def _gets_constant(following: Sequence[tuple[int, int]], constants: Sequence[Any]) -> bool:
    """Whether what follows ``getattr`` is a call with a value, a constant name, and at most a default."""
    kinds = [operation for operation, _ in following]
    if not kinds or kinds[0] not in _ONE_VALUE:
        return False
    name = next((i for i, kind in enumerate(kinds) if i and kind not in _ATTRIBUTES), len(kinds))
    if name == len(kinds) or kinds[name] != _CONSTANT or type(constants[following[name][1]]) is not str:
        return False
    rest = kinds[name + 1 :]
    if rest and rest[0] in _ONE_VALUE | {_CONSTANT}:
        del rest[0]
    return bool(rest) and rest[0] in _CALLS


def _operations(bytecode: bytes) -> list[tuple[int, int]]:
    """Each operation and its argument. A model's code has some ten thousand."""
    operations = []
    extended = 0
    for operation, argument in zip(bytecode[::2], bytecode[1::2], strict=True):
        if operation == _CACHE:
            continue
        if operation == _EXTENDED:
            extended = (extended | argument) << 8
        else:
            operations.append((operation, extended | argument))
            extended = 0
    return operations
