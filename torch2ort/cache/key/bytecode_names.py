"""Identity of compiled Python code, and the names that it uses.

Bytecode is read instead of source text, because bytecode runs, and a source file may have changed since it
was imported. Line numbers, file names and comments are no part of it. Each Python has its own operations:
only the bytecode of :data:`KNOWN_PYTHONS` is read.
"""

from __future__ import annotations

import functools
import opcode
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch2ort.cache.key.constant_bytes import atom, form

# The versions whose operations the tests compare with the output of `dis`.
KNOWN_PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))

_GLOBAL_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE_NAMES = ("LOAD_ATTR", "LOAD_METHOD")
# Low bits of an opcode's argument that are flags, and not part of the index of a name.
_FLAG_BITS = {
    "LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_SUPER_ATTR": 2,
}


# Without the pseudo-operations that only the compiler uses; from 3.12 on the table contains these, too.
_NUMBERS = {name: number for name, number in opcode.opmap.items() if number < 256}


def _codes(*names: str) -> set[int]:
    return {_NUMBERS[name] for name in names if name in _NUMBERS}


_SHIFTS = {
    _NUMBERS[name]: _FLAG_BITS.get(name, 0)
    for name in (*_GLOBAL_NAMES, *_ATTRIBUTE_NAMES, "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM")
    if name in _NUMBERS
}
_GLOBALS = _codes(*_GLOBAL_NAMES)
_ATTRIBUTES = _codes(*_ATTRIBUTE_NAMES)
_ONE_VALUE = _GLOBALS | _codes("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_IMPORT, _IMPORT_FROM = _NUMBERS["IMPORT_NAME"], _NUMBERS["IMPORT_FROM"]
_CONSTANT = _NUMBERS["LOAD_CONST"]
_MATCH_CLASS = _NUMBERS["MATCH_CLASS"]
_CALLS = _codes("CALL", "PRECALL", "CALL_FUNCTION")
_EXTENDED = opcode.EXTENDED_ARG
# Operations before or after the name of a callee, and in front of each operation that is distinguished here.
_SILENT = _codes("CACHE", "PUSH_NULL") | {_EXTENDED}


def _any_of(codes: Collection[int]) -> bytes:
    """Return a regular expression for one byte out of ``codes``."""
    return b"[%s]" % b"".join(re.escape(bytes([code])) for code in codes) if codes else b"(?!)"


# Patterns over the operations alone, without their arguments: a global variable and the attributes that are
# read from it at once, and the other operations of interest.
_CACHES = b"(?:%s)*" % _any_of(_codes("CACHE"))
_ATTRIBUTE = b"%s*%s%s" % (_any_of({_EXTENDED}), _any_of(_ATTRIBUTES), _CACHES)
_CHAIN = b"%s%s((?:%s)*)" % (_any_of(_GLOBALS), _CACHES, _ATTRIBUTE)
_TELLING = re.compile(b"%s|%s" % (_CHAIN, _any_of({_IMPORT, _IMPORT_FROM, _MATCH_CLASS})))

# With these, code can read an attribute whose name it does not contain.
_REFLECTION = frozenset({"vars", "dir", "__dict__", "attrgetter", "methodcaller", "__getattribute__"})


@dataclass
class Uses:
    """Names that a piece of code uses, in a fixed order.

    Attributes:
        chains: ``("torch", "nn", "functional")`` for ``torch.nn.functional``: a global variable and the
            attributes that are read from it at once.
        imports: modules that the code itself imports, with a dot in front for each level of a relative
            import -> the names that it imports from them.
        names: every attribute and global, and every string that could be an argument of ``getattr``.
        any_name: True if the code may read an attribute whose name is computed at run time.
    """

    chains: dict[tuple[str, ...], None] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    any_name: bool = False


# Each start of a model walks twice, and layers share their code.
@functools.lru_cache(maxsize=4096)
def uses_of(code: CodeType) -> Uses:
    """Return the names that ``code`` uses, with those of the functions, classes and lambdas inside it.

    Equal code shares one object, which callers must not change.
    """
    uses = Uses()
    for part in _with_nested(code):
        _read(part, uses)
    uses.any_name = uses.any_name or not _REFLECTION.isdisjoint(uses.names)
    return uses


def code_bytes(code: CodeType) -> bytes:
    """Return bytes that are equal if and only if two pieces of code do the same with the same values."""
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
    bytecode, constants, names = code.co_code, code.co_consts, code.co_names
    uses.names.update(names)
    uses.names.update(_identifiers(constants))
    operations, arguments = bytecode[::2], _arguments(bytecode)
    taken: list[str] = []
    # A regular expression finds them, because a model's code has some ten thousand operations.
    for found in _TELLING.finditer(operations):
        first, end = found.span()
        operation = operations[first]
        if operation == _MATCH_CLASS:
            uses.any_name = True  # the class maps positions of a pattern to names
            continue
        name = names[arguments[first] >> _SHIFTS[operation]]
        if operation in _GLOBALS:
            places = range(first + 1, end) if found[1] else ()
            read = [
                names[arguments[place] >> _SHIFTS[operations[place]]]
                for place in places
                if operations[place] in _ATTRIBUTES
            ]
            chain = (name, *read)
            uses.chains[chain] = None
            if name in ("getattr", "hasattr"):
                following = _operations(bytecode, 2 * first + 2)
                uses.any_name = uses.any_name or not _gets_constant(following, constants)
        elif operation == _IMPORT:
            level, listed = list(_operations(bytecode[: 2 * first]))[-2:]
            taken = uses.imports.setdefault("." * _pushed_number(level, constants) + name, [])
            if constants[listed[1]] is None:
                taken = []  # `import a.b as c` imports the module itself
        else:
            taken.append(name)


def _arguments(bytecode: bytes) -> Sequence[int]:
    """Return the argument of each operation."""
    operations, arguments = bytecode[::2], bytecode[1::2]
    if _EXTENDED not in operations:
        return arguments
    whole: list[int] = []
    extended = 0
    for operation, argument in zip(operations, arguments, strict=True):
        whole.append(extended | argument)
        extended = whole[-1] << 8 if operation == _EXTENDED else 0
    return whole


def _identifiers(constants: Sequence[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str and constant.isidentifier():
            yield constant
        elif type(constant) is tuple:
            yield from _identifiers(constant)


def _pushed_number(operation: tuple[int, int], constants: Sequence[Any]) -> int:
    code, argument = operation
    return int(constants[argument]) if code == _CONSTANT else argument


def _gets_constant(following: Iterator[tuple[int, int]], constants: Sequence[Any]) -> bool:
    """Return True if ``getattr`` is called with a value, a constant name, and at most a default."""
    if next(following)[0] not in _ONE_VALUE:
        return False
    name, argument = next(step for step in following if step[0] not in _ATTRIBUTES)
    if name != _CONSTANT or type(constants[argument]) is not str:
        return False
    call, _ = next(following)
    if call in _ONE_VALUE or call == _CONSTANT:
        call, _ = next(following)
    return call in _CALLS


def _operations(bytecode: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    """Return each operation from the byte ``start`` on, with its argument."""
    steps = zip(bytecode[start::2], _arguments(bytecode[start:]), strict=True)
    return (step for step in steps if step[0] not in _SILENT)
