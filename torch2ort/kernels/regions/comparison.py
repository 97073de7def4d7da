"""Whether what compiled code gives for a region differs from PyTorch's kernels by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch2ort.kernels.regions.region import decode_region, in_float32

# Rounding: between these are a fused kernel's results and those of its operators one by one.
_BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 2e-4),
}
_HALF = frozenset({torch.bfloat16, torch.float16})


def difference(text: str, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> str:
    """How compiled code's results differ from those of PyTorch's kernels; empty if only by rounding.

    Args:
        text: of the region.
        run: the compiled code.
    """
    region = decode_region(text)
    tensors = region.samples(torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = region.run(tensors)
        try:
            found = run(list(tensors))
        except Exception as error:  # whatever a library can say
            return f"run ends in {type(error).__name__}: {error}"
    if len(found) != len(expected):
        return f"outputs are {len(found)}, not {len(expected)}"
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (other.dtype, other.shape) != (one.dtype, one.shape) or not other.is_contiguous():
            return f"output {position} has another type, shape or order than that of PyTorch's kernels"
        relative, absolute = _BOUNDS.get(one.dtype, (0.0, 0.0))
        if torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            continue
        if one.dtype not in _HALF or not _is_nearer(other, one, _in_float32(text, tensors)[position]):
            return f"output {position} differs from that of PyTorch's kernels"
    return ""


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
    if not torch.equal(torch.where(finite, 0, found).nan_to_num(), other.nan_to_num()):
        return False
    errors = [(t.float() - exact)[finite].abs().max() for t in (found, expected)]
    return bool(errors[0] <= errors[1])
