"""A region of a program: calls of ATen operators with numbered operands, known types and named sizes.

A size is a number, or an expression over varying sizes. Each varying size has a name, and is a dimension of
a tensor that the region reads.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from torch2ort.errors import EngineError, ModelLoadError
from torch2ort.kernels.functions import OperatorCall, decode_call
from torch2ort.sizes import expressions

Size: TypeAlias = int | sympy.Expr
# Element type and sizes of a tensor.
Shape: TypeAlias = tuple[torch.dtype, tuple[Size, ...]]
# A file may contain any text: one that these patterns accept is parsed quickly.
_POWER = re.compile(r"\b[A-Za-z]\w*\*\*\d\b(?!\*\*)")
_PLAIN = re.compile(r"(?!.*(?:\*\*|\d{19}))[\w+\-*/%(), ]{1,400}")
# The smallest value that compiled code assumes for a varying size, as torch does: 0 and 1 have separate
# rules.
SMALLEST = 2
# Numbers that a region is tried on besides random ones, one set after the other: the effect of an infinity on
# its row would hide that of the others.
ORDINARY = (math.nan, 0.0, -0.0, 50.0, -50.0)
INFINITE = (math.inf, -math.inf)


@dataclass(frozen=True)
class _Numbers:
    """A placeholder of the tensor whose sizes a call takes as numbers; see :class:`OperatorCall`."""

    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Region:
    """The computation of a region.

    Attributes:
        inputs: element type and sizes of each tensor that it reads; all are contiguous.
        calls: its calls in order; for each, the numbers of the tensors and the sizes that are its arguments.
            Inputs have the first numbers, results the next ones.
        outputs: numbers of the tensors that it returns; all are contiguous, and no two share memory.
    """

    inputs: tuple[Shape, ...]
    calls: tuple[tuple[OperatorCall, tuple[int, ...], tuple[Size, ...]], ...]
    outputs: tuple[int, ...]

    @functools.cached_property
    def varying(self) -> dict[str, tuple[int, int]]:
        """The name of each varying size -> the index of an input, and its dimension of that size."""
        found: dict[str, tuple[int, int]] = {}
        for position, (_, sizes) in enumerate(self.inputs):
            for dimension, size in enumerate(sizes):
                if isinstance(size, sympy.Symbol):
                    found.setdefault(size.name, (position, dimension))
        return found

    def values(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the values of the varying sizes for these inputs, by name."""
        return {name: tensors[i].shape[d] for name, (i, d) in self.varying.items()}

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs, computed call by call by PyTorch's kernels."""
        sizes = self.values(tensors)
        values = list(tensors)
        for call, operands, numbers in self.calls:
            given: list[Any] = [values[i] for i in operands]
            if numbers:
                given.append(_Numbers(shape_of(numbers, sizes)))
            result = call.result(given)
            values.extend(result if isinstance(result, (tuple, list)) else (result,))
        return tuple(values[i].contiguous() for i in self.outputs)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that compiled code would misread.

        Raises:
            EngineError: a tensor has another type, shape or memory layout than the region's input.
        """
        ranks = [len(sizes) for _, sizes in self.inputs] == [tensor.dim() for tensor in tensors]
        values = self.values(tensors) if ranks else {}
        for position, (tensor, (dtype, sizes)) in enumerate(zip(tensors, self.inputs, strict=True)):
            fits = ranks and tensor.shape == shape_of(sizes, values)
            if tensor.dtype is not dtype or not fits or not tensor.is_contiguous():
                raise EngineError(
                    f"tensor {position} of a fused region is {tensor.dtype} of shape {list(tensor.shape)}, "
                    f"but it was compiled for {dtype} of shape [{', '.join(map(written, sizes))}], "
                    f"contiguous. A Function of the model returned another shape or type than when it was "
                    f"exported. With Options(fuse=False) operators run one by one"
                )

    def is_compiled_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if compiled code supports the sizes of these tensors, which :meth:`check` accepts."""
        return all(value >= SMALLEST for value in self.values(tensors).values())

    def samples(
        self,
        generator: torch.Generator,
        values: Mapping[str, int] | None = None,
        special: Sequence[float] = ORDINARY,
    ) -> list[torch.Tensor]:
        """Return random inputs, with a few special numbers among floating-point ones.

        Args:
            generator: the source of the random numbers.
            values: of the varying sizes, by name.
            special: the special numbers; small inputs contain only the first of them.
        """
        shapes = [(dtype, shape_of(sizes, values or {})) for dtype, sizes in self.inputs]
        return [_sample(dtype, shape, generator, special) for dtype, shape in shapes]


def shape_of(sizes: Iterable[Size], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of sizes.

    Args:
        sizes: numbers and expressions.
        values: of the varying sizes, by name.
    """
    return tuple(size if isinstance(size, int) else expressions.evaluate(size, values) for size in sizes)


def written(size: Size) -> str:
    """Return a size as a text."""
    return str(size) if isinstance(size, int) else expressions.text(sympy.expand(size))


def as_json(sizes: Iterable[Size]) -> list[int | str]:
    """Return sizes as values for JSON; :func:`read` reads each of them."""
    return [size if isinstance(size, int) else written(size) for size in sizes]


def read(size: int | str) -> Size:
    """Return a size from its number or text.

    Raises:
        ValueError: the text is not arithmetic of names and integers.
    """
    if isinstance(size, int):
        return int(size)
    if _PLAIN.fullmatch(_POWER.sub("n", size)) is None:
        raise ValueError(f"{size!r} is not a size")
    found = expressions.parse(size)
    return int(found) if found.is_Integer else found


def shapes_as_json(shapes: Iterable[tuple[torch.dtype, Sequence[Size]]]) -> list[list[Any]]:
    """Return types and sizes of tensors as values for JSON; :func:`read_shapes` reads them."""
    return [[str(dtype).removeprefix("torch."), as_json(sizes)] for dtype, sizes in shapes]


def read_shapes(shapes: Iterable[Sequence[Any]]) -> tuple[Shape, ...]:
    """Return the types and sizes of tensors that :func:`shapes_as_json` wrote.

    Raises:
        AttributeError: a type is not one of torch's.
        ValueError: a size is invalid or missing.
    """
    return tuple((getattr(torch, dtype), tuple(map(read, sizes))) for dtype, sizes in shapes)


def encode_region(
    inputs: Sequence[tuple[torch.dtype, Sequence[Size]]],
    calls: Sequence[tuple[str, Sequence[int], Sequence[Size]]],
    outputs: Sequence[int],
) -> str:
    """Return the text that :func:`decode_region` turns into a :class:`Region`.

    Args:
        inputs: as :attr:`Region.inputs`.
        calls: for each call, the text of :func:`torch2ort.kernels.functions.encode_call`, its operands, and
            the sizes that are its arguments.
        outputs: as :attr:`Region.outputs`.
    """
    called = [[call, list(operands), as_json(numbers)] for call, operands, numbers in calls]
    return json.dumps(
        {"inputs": shapes_as_json(inputs), "calls": called, "outputs": list(outputs)}, sort_keys=True
    )


@functools.lru_cache(maxsize=1024)
def decode_region(text: str) -> Region:
    """Return the region that ``text`` describes.

    Raises:
        ModelLoadError: the text does not describe a region.
    """
    try:
        record = json.loads(text)
        region = Region(
            inputs=read_shapes(record["inputs"]),
            calls=tuple(
                (decode_call(call), tuple(map(int, operands)), tuple(map(read, numbers)))
                for call, operands, numbers in record["calls"]
            ),
            outputs=tuple(map(int, record["outputs"])),
        )
        named = {s.name for size in _sizes(region) if not isinstance(size, int) for s in size.free_symbols}
        if not named <= region.varying.keys():
            raise ValueError("a size is not a dimension of an input")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"not a fused region: {text!r} ({error})") from None
    return region


def _sizes(region: Region) -> Iterable[Size]:
    for _, sizes in region.inputs:
        yield from sizes
    for _, _, numbers in region.calls:
        yield from numbers


def in_float32(text: str) -> str:
    """Return the text of the same region with float32 in the place of each half precision."""
    return re.sub(r"\bb?float16\b", "float32", text)


def calls_of(text: str) -> list[str]:
    """Return the text of each call in the text of a region.

    Raises:
        ModelLoadError: the text does not describe a region.
    """
    decode_region(text)
    return [call for call, *_ in json.loads(text)["calls"]]


def _sample(
    dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, special: Sequence[float]
) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(2, shape, generator=generator, device="cpu").to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    flat = values.view(-1)
    # Special numbers are at the start of the first row, so that a normalization of other rows stays finite.
    special = special[: max(flat.numel() // 8, min(flat.numel(), 2) if special is INFINITE else 0)]
    flat[: len(special)] = torch.tensor(special, dtype=dtype, device="cpu")
    return values
