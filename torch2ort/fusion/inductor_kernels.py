"""What torch's inductor makes of a region: kernels in C++, and the order in which they are called.

Inductor writes a module in Python that holds the kernels as texts and calls them one after the other. Its
calls are run here once, on stand-ins for tensors, which note what is called with what. A module that does
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

# What is kept of the module: its kernels, and what calls them.
_CALLS = frozenset({"Runner", "call", "runner"})
# What a kernel takes besides addresses: a size that varies, or what is computed of some.
_NUMBER = "const int64_t"


class UnknownCodeError(Exception):
    """Inductor wrote something that is not known here."""


@dataclass(eq=False)
class Buffer:
    """Memory of one call.

    Attributes:
        size: in bytes.
        is_input: whether the caller's, which nobody writes to.
    """

    size: Size
    is_input: bool = False


@dataclass(frozen=True)
class View:
    """A tensor in a buffer.

    Attributes:
        buffer: where it lies.
        dtype: type of its elements.
        sizes: of its dimensions.
        strides: likewise, in elements.
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
        """Whether it lies in the order of its dimensions, without gaps."""
        return _fits(self.sizes, self.strides, _dense(self.sizes))


@dataclass(frozen=True)
class Kernel:
    """A function in C++.

    Attributes:
        types: of its parameters: pointers, and numbers of 64 bits.
        source: its text, where it is called ``kernel``.
    """

    types: tuple[str, ...]
    source: str


@dataclass
class Lowered:
    """What inductor makes of a region.

    Attributes:
        calls: kernels with what they are called with, in order.
        inputs: the tensors that the region reads.
        outputs: those that it gives, contiguous; several may lie in one buffer, or in that of an input.
        buffers: the memory that the calls need besides the inputs'.
    """

    inputs: tuple[View, ...]
    calls: list[tuple[Kernel, tuple[View | Size, ...]]] = field(default_factory=list)
    outputs: tuple[View, ...] = ()
    buffers: list[Buffer] = field(default_factory=list)


def lowered(code: str, inputs: Sequence[Shape], varying: Sequence[str] = ()) -> Lowered:
    """What the module ``code`` does.

    Args:
        code: as inductor writes it.
        inputs: element type and sizes of the tensors that it takes, all contiguous.
        varying: names of the sizes that vary, which it takes in front of them.

    Raises:
        UnknownCodeError: it does more than to call kernels, or something that is not known here.
    """
    views = []
    for dtype, sizes in inputs:
        strides = _dense(sizes)
        buffer = Buffer(_extent(sizes, strides) * dtype.itemsize, is_input=True)
        views.append(View(buffer, dtype, sizes, strides))
    recorder = _Recorder(Lowered(tuple(views)))
    try:
        call = _caller(code, recorder)
        outputs = call([*map(symbol, varying), *views])
    except UnknownCodeError:
        raise
    except Exception as error:  # whatever a stand-in makes of an operator that it knows not
        raise UnknownCodeError(f"{type(error).__name__}: {error}") from error
    if not all(isinstance(output, View) and output.is_contiguous for output in outputs):
        raise UnknownCodeError("an output is no tensor in the order of its dimensions")
    recorder.found.outputs = tuple(outputs)
    return recorder.found


class _Recorder:
    """Stands for what inductor's module calls."""

    def __init__(self, found: Lowered) -> None:
        self.found = found

    def names(self) -> dict[str, Any]:
        """What the module finds under the names that it uses."""
        return {
            "torch": torch,
            "async_compile": self,
            "empty_strided_cpu": self.empty,
            "reinterpret_tensor": self.reinterpret,
            "assert_size_stride": self.expect,
        }

    def cpp_pybinding(self, types: Sequence[str], source: str) -> Callable[..., None]:
        """A kernel that the module can call."""
        kernel = Kernel(tuple(types), source)

        def call(*given: View | Size) -> None:
            if len(given) != len(types):
                raise UnknownCodeError("a kernel is called with more or less than it takes")
            for value, kind in zip(given, types, strict=True):
                if not _is_taken(value, kind):
                    raise UnknownCodeError(f"a kernel is called with {value!r} for {kind}")
            self.found.calls.append((kernel, given))

        return call

    def empty(self, sizes: tuple[Size, ...], strides: tuple[Size, ...], dtype: torch.dtype) -> View:
        """Memory that nobody wrote to."""
        buffer = Buffer(_extent(sizes, strides) * dtype.itemsize)
        self.found.buffers.append(buffer)
        return View(buffer, dtype, tuple(sizes), tuple(strides))

    def reinterpret(
        self, view: View, sizes: tuple[Size, ...], strides: tuple[Size, ...], offset: Size
    ) -> View:
        """The same memory in other sizes."""
        start = view.offset + offset * view.dtype.itemsize
        made = View(view.buffer, view.dtype, tuple(sizes), tuple(strides), start)
        if not _is_never_negative(start) or not _is_never_negative(view.buffer.size - start - made.extent):
            raise UnknownCodeError("a view is larger than its memory")
        return made

    def expect(self, view: View, sizes: tuple[Size, ...], strides: tuple[Size, ...], *said: str) -> None:
        """Refuse another order than the kernels are for."""
        if not _is_equal(view.sizes, tuple(sizes)) or not _fits(view.sizes, view.strides, tuple(strides)):
            raise UnknownCodeError("the kernels are for another order in memory")


def _caller(code: str, recorder: _Recorder) -> Callable[[list[View | Size]], Sequence[View]]:
    """The function ``call`` of inductor's module."""
    module = ast.parse(code)
    module.body = [statement for statement in module.body if _is_kept(statement)]
    names = recorder.names()
    exec(compile(module, "<inductor>", "exec"), names)  # torch wrote it in this process
    found: Callable[[list[View | Size]], Sequence[View]] = names["call"]
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


def _is_taken(value: View | Size, kind: str) -> bool:
    """Whether a kernel can be called with a value where it has a parameter of a type."""
    if not isinstance(value, View):
        return kind == _NUMBER and isinstance(value, int | sympy.Expr)
    return kind.endswith("*") and (kind.startswith("const ") or not value.buffer.is_input)


def _dense(sizes: Sequence[Size]) -> tuple[Size, ...]:
    # What varies is never 0.
    counts = [max(size, 1) if isinstance(size, int) else size for size in sizes]
    return tuple(math.prod(counts[i + 1 :]) for i in range(len(sizes)))


def _fits(sizes: Sequence[Size], strides: Sequence[Size], expected: Sequence[Size]) -> bool:
    """Whether strides are as expected where they count."""
    return all(
        size == 1 or _is_equal([stride], [wanted])
        for size, stride, wanted in zip(sizes, strides, expected, strict=True)
    )


def _is_equal(these: Sequence[Size], those: Sequence[Size]) -> bool:
    """Whether sizes are the same, whatever those are that vary."""
    return len(these) == len(those) and all(
        sympy.expand(one - other) == 0 for one, other in zip(these, those, strict=True)
    )


def _is_never_negative(size: Size) -> bool:
    """Whether it is known of a size that it is no less than 0."""
    if isinstance(size, int):
        return size >= 0
    more = {s: symbol(s.name) + SMALLEST for s in size.free_symbols}
    return bool(sympy.expand(size.subs(more)).is_nonnegative)


def _extent(sizes: Sequence[Size], strides: Sequence[Size]) -> Size:
    """Elements from the first to the last."""
    if 0 in sizes:
        return 0
    extent: Size = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    # In one form, so that equal ones are equal.
    return extent if isinstance(extent, int) else sympy.expand(extent)
