"""The code that torch's inductor generates for a region: kernels in C++, and the order of their calls.

Inductor writes a Python module that contains the sources of the kernels and calls them one after the other.
The module is run here once, on placeholders of tensors, and its calls are recorded. A module that does
anything else is refused.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from torch2ort.fusion.region import SMALLEST, Shape, Size
from torch2ort.sizes.expressions import symbol

# The parts of the module that are kept: its kernels, and the code that calls them.
_CALLS = frozenset({"Runner", "call", "runner"})
# The type of a kernel's parameters besides addresses: varying sizes, or numbers computed of these.
_NUMBER = "const int64_t"


class UnknownCodeError(Exception):
    """Inductor wrote code of an unknown form."""


@dataclass(eq=False)
class Buffer:
    """Memory of one call.

    Attributes:
        size: in bytes.
        is_input: whether it is an input of the caller, which is not written to.
    """

    size: Size
    is_input: bool = False


@dataclass(frozen=True)
class BufferView:
    """A tensor in a buffer.

    Attributes:
        buffer: its memory.
        dtype: type of its elements.
        sizes: of its dimensions.
        strides: of its dimensions, in elements.
        offset: of its first element from the buffer's beginning, in bytes.
    """

    buffer: Buffer
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0

    @property
    def extent(self) -> Size:
        """Bytes from its first element to its last."""
        return _extent(self.sizes, self.strides) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if its elements are in the order of its dimensions, without gaps."""
        return _fits(self.sizes, self.strides, _dense(self.sizes))


@dataclass(frozen=True)
class Kernel:
    """A function in C++.

    Attributes:
        types: of its parameters: pointers, and numbers of 64 bits.
        source: its text, in which its name is ``kernel``.
    """

    types: tuple[str, ...]
    source: str


@dataclass
class RecordedModule:
    """The code that inductor generates for a region.

    Attributes:
        calls: kernels with their arguments, in order.
        inputs: the tensors that the region reads.
        outputs: its results, contiguous; several may share one buffer, or that of an input.
        buffers: the memory that the calls need besides the inputs.
    """

    inputs: tuple[BufferView, ...]
    calls: list[tuple[Kernel, tuple[BufferView | Size, ...]]] = field(default_factory=list)
    outputs: tuple[BufferView, ...] = ()
    buffers: list[Buffer] = field(default_factory=list)


def record_calls(code: str, inputs: Sequence[Shape], varying: Sequence[str] = ()) -> RecordedModule:
    """Return the kernels, calls and buffers of the module ``code``.

    Args:
        code: as inductor writes it.
        inputs: element type and sizes of its tensor arguments, all contiguous.
        varying: names of the varying sizes, which are its first arguments.

    Raises:
        UnknownCodeError: the module does more than call kernels, or is of an unknown form.
    """
    views = []
    for dtype, sizes in inputs:
        strides = _dense(sizes)
        buffer = Buffer(_extent(sizes, strides) * dtype.itemsize, is_input=True)
        views.append(BufferView(buffer, dtype, sizes, strides))
    recorder = _Recorder(RecordedModule(tuple(views)))
    try:
        call = _caller(code, recorder)
        outputs = call([*map(symbol, varying), *views])
    except UnknownCodeError:
        raise
    except Exception as error:  # a placeholder raises any error for an operator that it does not support
        raise UnknownCodeError(f"{type(error).__name__}: {error}") from error
    if not all(isinstance(output, BufferView) and output.is_contiguous for output in outputs):
        raise UnknownCodeError("an output is not a contiguous tensor")
    recorder.found.outputs = tuple(outputs)
    return recorder.found


class _Recorder:
    """The replacement of the functions that inductor's module calls; it records the calls."""

    def __init__(self, found: RecordedModule) -> None:
        self.found = found

    def names(self) -> dict[str, Any]:
        """Return the objects for the global names that the module uses."""
        return {
            "torch": torch,
            "async_compile": self,
            "empty_strided_cpu": self.empty,
            "reinterpret_tensor": self.reinterpret,
            "assert_size_stride": self.expect,
        }

    def cpp_pybinding(self, types: Sequence[str], source: str) -> Callable[..., None]:
        """Return a kernel that the module can call."""
        kernel = Kernel(tuple(types), source)

        def call(*given: BufferView | Size) -> None:
            if len(given) != len(types):
                raise UnknownCodeError("a kernel is called with a wrong number of arguments")
            for value, kind in zip(given, types, strict=True):
                if not _is_taken(value, kind):
                    raise UnknownCodeError(f"a kernel is called with {value!r} for {kind}")
            self.found.calls.append((kernel, given))

        return call

    def empty(self, sizes: tuple[Size, ...], strides: tuple[Size, ...], dtype: torch.dtype) -> BufferView:
        """Return a view of new, uninitialized memory."""
        buffer = Buffer(_extent(sizes, strides) * dtype.itemsize)
        self.found.buffers.append(buffer)
        return BufferView(buffer, dtype, tuple(sizes), tuple(strides))

    def reinterpret(
        self, view: BufferView, sizes: tuple[Size, ...], strides: tuple[Size, ...], offset: Size
    ) -> BufferView:
        """Return a view of the same memory with other sizes."""
        start = view.offset + offset * view.dtype.itemsize
        made = BufferView(view.buffer, view.dtype, tuple(sizes), tuple(strides), start)
        if not _is_never_negative(start) or not _is_never_negative(view.buffer.size - start - made.extent):
            raise UnknownCodeError("a view is larger than its memory")
        return made

    def expect(
        self, view: BufferView, sizes: tuple[Size, ...], strides: tuple[Size, ...], *said: str
    ) -> None:
        """Refuse a memory layout that differs from the one that the kernels expect."""
        if not _is_equal(view.sizes, tuple(sizes)) or not _fits(view.sizes, view.strides, tuple(strides)):
            raise UnknownCodeError("the kernels expect another memory layout")


def _caller(code: str, recorder: _Recorder) -> Callable[[list[BufferView | Size]], Sequence[BufferView]]:
    """Return the function ``call`` of inductor's module."""
    module = ast.parse(code)
    module.body = [statement for statement in module.body if _is_kept(statement)]
    names = recorder.names()
    exec(compile(module, "<inductor>", "exec"), names)  # torch wrote it in this process
    found: Callable[[list[BufferView | Size]], Sequence[BufferView]] = names["call"]
    return found


def _is_kept(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return statement.name in _CALLS
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    value = statement.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        of = value.func.value
        if isinstance(of, ast.Name) and of.id == "async_compile":
            return True
    return statement.targets[0].id in _CALLS


def _is_taken(value: BufferView | Size, kind: str) -> bool:
    """Return True if a kernel accepts a value for a parameter of the type ``kind``."""
    if not isinstance(value, BufferView):
        return kind == _NUMBER and isinstance(value, int | sympy.Expr)
    return kind.endswith("*") and (kind.startswith("const ") or not value.buffer.is_input)


def _dense(sizes: Sequence[Size]) -> tuple[Size, ...]:
    # A varying size is never 0.
    counts = [max(size, 1) if isinstance(size, int) else size for size in sizes]
    return tuple(math.prod(counts[i + 1 :]) for i in range(len(sizes)))


def _fits(sizes: Sequence[Size], strides: Sequence[Size], expected: Sequence[Size]) -> bool:
    """Return True if strides are as expected, in dimensions of other sizes than 1."""
    return all(
        size == 1 or _is_equal([stride], [wanted])
        for size, stride, wanted in zip(sizes, strides, expected, strict=True)
    )


def _is_equal(these: Sequence[Size], those: Sequence[Size]) -> bool:
    """Return True if sizes are equal for all values of the varying ones."""
    return len(these) == len(those) and all(
        sympy.expand(one - other) == 0 for one, other in zip(these, those, strict=True)
    )


def _is_never_negative(size: Size) -> bool:
    """Return True if a size is known to be at least 0."""
    if isinstance(size, int):
        return size >= 0
    more = {s: symbol(s.name) + SMALLEST for s in size.free_symbols}
    return bool(sympy.expand(size.subs(more)).is_nonnegative)


def _extent(sizes: Sequence[Size], strides: Sequence[Size]) -> Size:
    """Return the number of elements from the first to the last, with those in gaps."""
    if 0 in sizes:
        return 0
    extent: Size = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    # The expanded form makes equal extents compare equal.
    return extent if isinstance(extent, int) else sympy.expand(extent)
