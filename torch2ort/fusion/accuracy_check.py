"""Comparison of a compiled region's results with those of PyTorch's kernels: they may differ by rounding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from torch2ort.fusion.region import INFINITE, ORDINARY, SMALLEST, Region, decode_region, in_float32, shape_of

# Relative and absolute rounding errors between a fused kernel and its operators one by one.
_BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 2e-4),
}
_HALF = frozenset({torch.bfloat16, torch.float16})
# The values that are tried for varying sizes: the smallest ones, odd ones, and a large one for one size after
# the other, for which sums are computed in another order.
_FEW, _ODD, _MANY = (2, 3, 5, 7, 11, 13, 17, 19), (17, 7, 5, 3, 2, 2, 2, 2), 5003
# The most elements of an input for which sizes are tried.
_MOST = 1 << 24


def difference(text: str, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> str:
    """Return how compiled code's results differ from those of PyTorch's kernels; empty if only by rounding.

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
    """Yield values for the varying sizes, by name; one empty dict if no size varies."""
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
    """Return how the results for these inputs differ; empty if only by rounding.

    Args:
        text: of the region.
        run: the compiled code.
        tensors: the inputs.
        sums: whether thousands of numbers may be summed: each sum then rounds as the largest result does.
        numbers_only: whether infinity and NaN count as equal.
    """
    region = decode_region(text)
    with torch.no_grad():
        try:
            found = run(list(tensors))
        except Exception as error:  # a library may raise any error
            return f"run raised {type(error).__name__}: {error}"
        said = _mismatch(text, found, region.run(tensors), tensors, sums=sums, numbers_only=numbers_only)
        if said:
            # oneDNN's GELU of infinity is NaN; that of PyTorch's own kernel is infinity.
            with warnings.catch_warnings():
                # torch warns about accelerators that it does not support.
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
            return f"output {position} has another type, shape or layout than that of PyTorch's kernels"
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
    """Return True if a region computes or reads the statistics of rows.

    The mean of a row with an infinity is NaN in PyTorch's kernels, which update it, and infinite in compiled
    code, which divides a sum; the row's results are NaN in both. In a backward, infinite statistics, which no
    kernel returns together with finite results, lead to infinity or NaN.
    """
    return any("_norm" in str(call.operator) for call, *_ in region.calls)


def _in_float32(text: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the results of PyTorch's kernels with float32 in the place of the region's half precisions."""
    region = decode_region(in_float32(text))
    with torch.no_grad():
        return region.run([t.to(dtype) for t, (dtype, _) in zip(tensors, region.inputs, strict=True)])


def _is_nearer(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return True if results in a half precision are as close to those in float32 as PyTorch's are.

    For example, PyTorch's LayerNorm sums the gradients of its weight in bfloat16, compiled code in float32.
    """
    finite = torch.isfinite(expected) & torch.isfinite(exact)
    other = torch.where(finite, 0, expected)
    if not torch.allclose(torch.where(finite, 0, found), other, rtol=0, atol=0, equal_nan=True):
        return False
    errors = [(t.float() - exact)[finite].abs().max() for t in (found, expected)]
    return bool(errors[0] <= errors[1])
