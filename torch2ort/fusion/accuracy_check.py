"""Whether what compiled code gives for a region differs from PyTorch's kernels by rounding alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from torch2ort.fusion.region import INFINITE, ORDINARY, SMALLEST, Region, decode_region, in_float32, shape_of

# Rounding: between these are a fused kernel's results and those of its operators one by one.
_BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 2e-4),
}
_HALF = frozenset({torch.bfloat16, torch.float16})
# What sizes that vary are in turn: at their smallest, odd ones, and one after the other many, where sums are
# added up in another way.
_FEW, _ODD, _MANY = (2, 3, 5, 7, 11, 13, 17, 19), (17, 7, 5, 3, 2, 2, 2, 2), 5003
# Numbers in an input, above which sizes are not tried.
_MOST = 1 << 24


def difference(text: str, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> str:
    """How compiled code's results differ from those of PyTorch's kernels; empty if only by rounding.

    Args:
        text: of the region.
        run: the compiled code.
    """
    region = decode_region(text)
    for values in _trials(region):
        for special in (ORDINARY, INFINITE):
            tensors = region.samples(torch.Generator().manual_seed(1), values, special)
            numbers = special is INFINITE and _normalizes(region)
            said = _difference(text, run, tensors, sums=_MANY in values.values(), numbers_only=numbers)
            if said:
                kind = " of infinite numbers" if special is INFINITE else ""
                return said + kind + (f" where {values}" if values else "")
    return ""


def _trials(region: Region) -> Iterator[dict[str, int]]:
    """Numbers for the sizes that vary, by name; nothing once, if there are none."""
    names = list(region.varying)
    if not names:
        yield {}
        return
    tried = [dict(zip(names, numbers, strict=False)) for numbers in (_FEW, _ODD)]
    tried += [{name: _MANY if name == large else SMALLEST for name in names} for large in names]
    for values in tried:
        if all(math.prod(shape_of(sizes, values)) <= _MOST for _, sizes in region.inputs):
            yield values


def _difference(
    text: str,
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    *,
    sums: bool,
    numbers_only: bool,
) -> str:
    """The same for these inputs.

    Args:
        text: of the region.
        run: the compiled code.
        tensors: the inputs.
        sums: of thousands of numbers, which round as the largest does.
        numbers_only: infinity and NaN count as one.
    """
    region = decode_region(text)
    with torch.no_grad():
        try:
            found = run(list(tensors))
        except Exception as error:  # whatever a library can say
            return f"run ends in {type(error).__name__}: {error}"
        said = _mismatch(text, found, region.run(tensors), tensors, sums=sums, numbers_only=numbers_only)
        if said:
            # oneDNN's GELU of infinity is not a number where PyTorch's own kernel gives infinity.
            with warnings.catch_warnings():
                # Of accelerators that this torch does not know.
                warnings.simplefilter("ignore", UserWarning)
                with torch.backends.mkldnn.flags(enabled=False):
                    expected = region.run(tensors)
            said = _mismatch(text, found, expected, tensors, sums=sums, numbers_only=numbers_only)
    return said


def _mismatch(
    text: str,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    *,
    sums: bool,
    numbers_only: bool,
) -> str:
    if len(found) != len(expected):
        return f"outputs are {len(found)}, not {len(expected)}"
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (other.dtype, other.shape) != (one.dtype, one.shape) or not other.is_contiguous():
            return f"output {position} has another type, shape or order than that of PyTorch's kernels"
        relative, absolute = _BOUNDS.get(one.dtype, (0.0, 0.0))
        if sums and one.dtype.is_floating_point:
            absolute *= max(1.0, float(one.abs().nan_to_num(0.0, 0.0).max()))
        if numbers_only and one.dtype.is_floating_point:
            other = torch.where(one.isfinite() | other.isfinite(), other, one)
        if torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            continue
        if one.dtype not in _HALF or not _is_nearer(other, one, _in_float32(text, tensors)[position]):
            return f"output {position} differs from that of PyTorch's kernels"
    return ""


def _normalizes(region: Region) -> bool:
    """Whether a region computes or reads the statistics of rows.

    The mean of a row with an infinity is NaN in PyTorch's kernels, which update it, and infinite in compiled
    code, which divides a sum; the row's results are NaN in both. And infinite statistics, which no kernel
    gives beside a number, come to one or the other in a backward.
    """
    return any("_norm" in str(call.operator) for call, *_ in region.calls)


def _in_float32(text: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What PyTorch's kernels give where the region's halves are float32."""
    region = decode_region(in_float32(text))
    with torch.no_grad():
        return region.run([t.to(dtype) for t, (dtype, _) in zip(tensors, region.inputs, strict=True)])


def _is_nearer(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether results in a half precision are as near to those in float32 as PyTorch's are.

    PyTorch's LayerNorm, for one, adds the gradients of its weight up in bfloat16, compiled code in float32.
    """
    finite = torch.isfinite(expected) & torch.isfinite(exact)
    other = torch.where(finite, 0, expected)
    if not torch.allclose(torch.where(finite, 0, found), other, rtol=0, atol=0, equal_nan=True):
        return False
    errors = [(t.float() - exact)[finite].abs().max() for t in (found, expected)]
    return bool(errors[0] <= errors[1])
