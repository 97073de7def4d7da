"""A region of a program: calls of ATen operators, their operands by number, sizes and types all known."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch2ort.errors import EngineError, ModelLoadError
from torch2ort.kernels.functions import Call, decode_call


@dataclass(frozen=True)
class Region:
    """What a region computes.

    Attributes:
        inputs: element type and sizes of each tensor that it reads; all are contiguous.
        calls: what it calls, in order, and the numbers of the tensors that each takes. Inputs have the first
            numbers, results the next ones.
        outputs: numbers of the tensors that it gives; all are contiguous, and no two share memory.
    """

    inputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    outputs: tuple[int, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, call by call in PyTorch's kernels."""
        values = list(tensors)
        for call, operands in self.calls:
            result = call.result([values[i] for i in operands])
            values.extend(result if isinstance(result, (tuple, list)) else (result,))
        return tuple(values[i].contiguous() for i in self.outputs)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that compiled code would read as others.

        Raises:
            EngineError: one has another type, other sizes or another order in memory.
        """
        for position, (tensor, (dtype, shape)) in enumerate(zip(tensors, self.inputs, strict=True)):
            if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise EngineError(
                    f"tensor {position} of a fused region is {tensor.dtype} of shape {list(tensor.shape)}, "
                    f"but it was compiled for {dtype} of shape {list(shape)}, contiguous. A Function of the "
                    f"model gave another shape or type than when it was exported. With Options(fuse=False) "
                    f"operators run one by one"
                )

    def samples(self, generator: torch.Generator) -> list[torch.Tensor]:
        """Random inputs, with a few special numbers among floating-point ones."""
        return [_sample(dtype, shape, generator) for dtype, shape in self.inputs]


def encode_region(
    inputs: Sequence[torch.Tensor], calls: Sequence[tuple[str, Sequence[int]]], outputs: Sequence[int]
) -> str:
    """The text that :func:`decode_region` turns back into a :class:`Region`.

    Args:
        inputs: tensors of the types and sizes that it reads.
        calls: of each call, what :func:`torch2ort.kernels.functions.encode_call` gave, and its operands.
        outputs: as :attr:`Region.outputs`.
    """
    given = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in inputs]
    return json.dumps({"inputs": given, "calls": list(calls), "outputs": list(outputs)}, sort_keys=True)


@functools.lru_cache(maxsize=1024)
def decode_region(text: str) -> Region:
    """The region that ``text`` describes.

    Raises:
        ModelLoadError: the text describes none.
    """
    try:
        record = json.loads(text)
        inputs = tuple((getattr(torch, dtype), tuple(map(int, shape))) for dtype, shape in record["inputs"])
        calls = tuple((decode_call(call), tuple(map(int, operands))) for call, operands in record["calls"])
        outputs = tuple(map(int, record["outputs"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"not a fused region: {text!r} ({error})") from None
    return Region(inputs, calls, outputs)


def in_float32(text: str) -> str:
    """The text of the same region with float32 in the place of each half precision."""
    return re.sub(r"\bb?float16\b", "float32", text)


def calls_of(text: str) -> list[str]:
    """The text of each call in what describes a region.

    Raises:
        ModelLoadError: the text describes none.
    """
    decode_region(text)
    return [call for call, _ in json.loads(text)["calls"]]


def _sample(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(2, shape, generator=generator, device="cpu").to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    flat = values.view(-1)
    # At the end of the first row, so that other rows of a normalisation stay numbers.
    special = [math.nan, 0.0, -0.0, 50.0, -50.0][: max(flat.numel() // 8, 0)]
    flat[: len(special)] = torch.tensor(special, dtype=dtype, device="cpu")
    return values
