"""The library of several regions as one C++ source, so that a compiler reads inductor's headers once.

Each region is a function that takes the addresses of its memory (inputs, outputs and temporaries) and the
varying sizes. A second function computes all other sizes from those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from torch2ort.fusion.inductor_kernels import Buffer, BufferView, Kernel, RecordedModule, UnknownCodeError
from torch2ort.fusion.region import Shape, Size

_INCLUDE = re.compile(r"^\s*#include\b.*$", re.MULTILINE)
_KERNEL = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')
_PRELUDE = """\
#include <cstdint>
#include <cstring>

#define TORCH2ORT_EXPORT extern "C" __attribute__((visibility("default")))

using Memory = char* const*;
"""
_ENTRY = """\
TORCH2ORT_EXPORT int32_t {entry}(Memory memory, const int64_t* sizes) {{
  try {{
{calls}
    return 0;
  }} catch (...) {{
    return 1;
  }}
}}
"""
_NUMBERS = """\
TORCH2ORT_EXPORT void {entry}(const int64_t* sizes, int64_t* numbers) {{
{lines}
}}
"""


@dataclass(frozen=True)
class CppProgram:
    """The calling convention of a region in its library.

    Attributes:
        entry: name of its function, which takes addresses and the varying sizes.
        outputs: element type and sizes of each output tensor; all are contiguous.
        temporaries: bytes of each piece of memory that it needs besides inputs and outputs.
    """

    entry: str
    outputs: tuple[Shape, ...]
    temporaries: tuple[Size, ...]

    @property
    def numbers(self) -> str:
        """Name of the function that computes sizes; only a region with varying sizes has one.

        It writes the sizes of the inputs' dimensions, then those of the outputs', then the bytes of the
        temporaries.
        """
        return f"{self.entry}_numbers"


def program_of(entry: str, found: RecordedModule, varying: Sequence[str] = ()) -> tuple[CppProgram, str]:
    """Return the calling convention of a region, and its part of the library's source.

    Args:
        entry: the name of its function, unique in the library.
        found: the kernels and calls that inductor made of it.
        varying: names of the varying sizes, in the order of the function's parameters.

    Raises:
        UnknownCodeError: a kernel is written in an unknown form.
    """
    names = {name: f"sizes[{i}]" for i, name in enumerate(varying)}
    places, copies = _places(found)
    kernels: dict[int, tuple[str, Kernel]] = {}
    calls = []
    for kernel, given in found.calls:
        name, _ = kernels.setdefault(id(kernel), (f"{entry}_{len(kernels)}", kernel))
        arguments = (
            f"reinterpret_cast<{kind}>({_address(value, places, names)})"
            if isinstance(value, BufferView)
            else _in_cpp(value, names)
            for kind, value in zip(kernel.types, given, strict=True)
        )
        calls.append(f"    {name}::kernel({', '.join(arguments)});")
    for position, view in copies:
        target, size = len(found.inputs) + position, _in_cpp(view.extent, names)
        calls.append(f"    std::memcpy(memory[{target}], {_address(view, places, names)}, {size});")
    parts = [_namespace(name, kernel) for name, kernel in kernels.values()]
    parts.append(_ENTRY.format(entry=entry, calls="\n".join(calls)))
    first = len(found.inputs) + len(found.outputs)
    temporaries = tuple(buffer.size for buffer, place in places.items() if place >= first)
    outputs = tuple((view.dtype, view.sizes) for view in found.outputs)
    program = CppProgram(entry, outputs, temporaries)
    if varying:
        told = [*(size for view in (*found.inputs, *found.outputs) for size in view.sizes), *temporaries]
        lines = (f"  numbers[{i}] = {_in_cpp(size, names)};" for i, size in enumerate(told))
        parts.append(_NUMBERS.format(entry=program.numbers, lines="\n".join(lines)))
    return program, "\n".join(parts)


def text_of(parts: Iterable[str], kernels: Iterable[Kernel]) -> str:
    """Return the source of a library.

    Args:
        parts: of its regions.
        kernels: of all of them.
    """
    includes = dict.fromkeys(line.strip() for k in kernels for line in _INCLUDE.findall(k.source))
    return "\n".join([*includes, _PRELUDE, *parts])


def _places(found: RecordedModule) -> tuple[Mapping[Buffer, int], list[tuple[int, BufferView]]]:
    """Return the index of each buffer among the addresses, and the outputs that are copied at the end.

    A buffer that consists of one output is that output's memory; other outputs are copied from their buffers.
    """
    places = {view.buffer: i for i, view in enumerate(found.inputs)}
    copies = []
    for position, view in enumerate(found.outputs):
        if view.buffer in places or view.extent != view.buffer.size:
            copies.append((position, view))
        else:
            places[view.buffer] = len(found.inputs) + position
    count = len(found.inputs) + len(found.outputs)
    for buffer in found.buffers:
        if buffer not in places:
            places[buffer] = count
            count += 1
    return places, copies


def _address(view: BufferView, places: Mapping[Buffer, int], names: Mapping[str, str]) -> str:
    return f"memory[{places[view.buffer]}] + {_in_cpp(view.offset, names)}"


def _in_cpp(size: Size, names: Mapping[str, str]) -> str:
    """Return the C++ expression of a size of which no part is negative.

    Args:
        size: a number, or an expression over varying sizes.
        names: the C++ expression of each varying size.

    Raises:
        UnknownCodeError: the expression contains an unknown operator.
    """
    if isinstance(size, int) or size.is_Integer:
        return str(int(size))
    if size.is_Symbol:
        return names[size.name]
    if isinstance(size, sympy.floor):
        above, below = sympy.together(size.args[0]).as_numer_denom()
        return f"({_in_cpp(above, names)} / {_in_cpp(below, names)})"
    if size.is_Pow and size.args[1].is_Integer and 0 < int(size.args[1]) <= 4:
        return _joined([size.args[0]] * int(size.args[1]), "*", names)
    if size.is_Add or size.is_Mul:
        return _joined(size.args, "+" if size.is_Add else "*", names)
    raise UnknownCodeError(f"the size {size} is not known in C++")


def _joined(sizes: Sequence[sympy.Expr], sign: str, names: Mapping[str, str]) -> str:
    """Return several sizes with an operator between them; see :func:`_in_cpp`."""
    return f"({f' {sign} '.join(_in_cpp(size, names) for size in sizes)})"


def _namespace(name: str, kernel: Kernel) -> str:
    body, count = _KERNEL.subn(
        "__attribute__((noinline)) static void kernel(", _INCLUDE.sub("", kernel.source)
    )
    if count != 1:
        raise UnknownCodeError("a kernel has no function of the known name")
    return f"namespace {name} {{\n{body.strip()}\n}}\n"
