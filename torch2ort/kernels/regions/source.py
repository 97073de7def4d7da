"""The library of several regions as one text in C++, so that a compiler reads inductor's headers once.

Each region is a function that takes the addresses of its memory: of the inputs, of the outputs, and of what
it needs in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from torch2ort.kernels.regions.lowering import Buffer, Kernel, Lowered, UnknownCodeError, View

_INCLUDE = re.compile(r"^\s*#include\b.*$", re.MULTILINE)
_KERNEL = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')
_PRELUDE = """\
#include <cstdint>
#include <cstring>

using Memory = char* const*;
"""
_ENTRY = """\
extern "C" __attribute__((visibility("default"))) int32_t {entry}(Memory memory) {{
  try {{
{calls}
    return 0;
  }} catch (...) {{
    return 1;
  }}
}}
"""


@dataclass(frozen=True)
class Program:
    """How a region is called in its library.

    Attributes:
        entry: name of its function.
        outputs: element type and sizes of each tensor that it gives; all are contiguous.
        temporaries: bytes of each piece of memory that it needs besides inputs and outputs.
    """

    entry: str
    outputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    temporaries: tuple[int, ...]


def program_of(entry: str, found: Lowered) -> tuple[Program, str]:
    """How a region is called, and its part of the library's text.

    Args:
        entry: what its function is to be called, unique in the library.
        found: what inductor made of it.

    Raises:
        UnknownCodeError: a kernel is written in another form than the one known here.
    """
    places, copies = _places(found)
    kernels: dict[int, tuple[str, Kernel]] = {}
    calls = []
    for kernel, views in found.calls:
        name, _ = kernels.setdefault(id(kernel), (f"{entry}_{len(kernels)}", kernel))
        arguments = (
            f"reinterpret_cast<{kind}>({_address(view, places)})"
            for kind, view in zip(kernel.types, views, strict=True)
        )
        calls.append(f"    {name}::kernel({', '.join(arguments)});")
    for position, view in copies:
        target = len(found.inputs) + position
        calls.append(f"    std::memcpy(memory[{target}], {_address(view, places)}, {view.size});")
    parts = [_namespace(name, kernel) for name, kernel in kernels.values()]
    parts.append(_ENTRY.format(entry=entry, calls="\n".join(calls)))
    first = len(found.inputs) + len(found.outputs)
    temporaries = tuple(buffer.size for buffer, place in places.items() if place >= first)
    outputs = tuple((view.dtype, view.sizes) for view in found.outputs)
    return Program(entry, outputs, temporaries), "\n".join(parts)


def text_of(parts: Iterable[str], kernels: Iterable[Kernel]) -> str:
    """The text of a library.

    Args:
        parts: of its regions.
        kernels: of all of them.
    """
    includes = dict.fromkeys(line.strip() for k in kernels for line in _INCLUDE.findall(k.source))
    return "\n".join([*includes, _PRELUDE, *parts])


def _places(found: Lowered) -> tuple[Mapping[Buffer, int], list[tuple[int, View]]]:
    """The number of each buffer among the addresses, and the outputs that are copied at the end.

    A buffer is the memory of the output that it holds; what lies in one of several tensors is copied.
    """
    places = {view.buffer: i for i, view in enumerate(found.inputs)}
    copies = []
    for position, view in enumerate(found.outputs):
        if view.buffer in places or view.size != view.buffer.size:
            copies.append((position, view))
        else:
            places[view.buffer] = len(found.inputs) + position
    count = len(found.inputs) + len(found.outputs)
    for buffer in found.buffers:
        if buffer not in places:
            places[buffer] = count
            count += 1
    return places, copies


def _address(view: View, places: Mapping[Buffer, int]) -> str:
    return f"memory[{places[view.buffer]}] + {view.offset}"


def _namespace(name: str, kernel: Kernel) -> str:
    body, count = _KERNEL.subn(
        "__attribute__((noinline)) static void kernel(", _INCLUDE.sub("", kernel.source)
    )
    if count != 1:
        raise UnknownCodeError("a kernel has no function of the known name")
    return f"namespace {name} {{\n{body.strip()}\n}}\n"
