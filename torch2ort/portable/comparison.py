"""Comparison of a body with the forward that it replaces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.errors import ExportError
from torch2ort.portable.body import tensors_of_node
from torch2ort.portable.probe import INSTEAD
from torch2ort.program.inline_autograd_functions import NotInlinedError, applied
from torch2ort.pythonop import Site
from torch2ort.pythonop.autocast import autocast_context
from torch2ort.runtime import InferenceEngine

_RANDOM = 2
# Tolerated relative differences, by the type of the result. Kernels of PyTorch and of ONNX Runtime differ by
# a few units in the last place per operator; forward consists of several operators.
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-7}
# One of this many elements may be rounded to the other side.
_ROUNDED = 10_000


def compare(site: Site, body: InferenceEngine, tensors: Sequence[torch.Tensor]) -> None:
    """Run a body and forward on the sample, and on random inputs of its sizes.

    Args:
        site: the call.
        body: runs its body.
        tensors: its tensors on the sample.

    Raises:
        ExportError: the results differ; reports by how much.
    """
    generator = torch.Generator().manual_seed(0)
    runs = [("the sample", list(tensors))]
    runs += [("random inputs", [_random(t, generator) for t in tensors]) for _ in range(_RANDOM)]
    for where, given in runs:
        try:
            expected = _eager(site, [t.clone() for t in given])
        except Exception:
            if where == "the sample":
                raise
            # Forward may refuse inputs that do not occur in the model.
            continue
        actual = body.run([t.detach().contiguous() for t in given])
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            difference = _difference(one, other)
            if difference is not None:
                raise ExportError(
                    f"{site.func_name} is not portable: its body does not compute the same as forward on "
                    f"{where}; output {i} differs by up to {difference:.6g}. Forward may depend on more "
                    f"than its arguments; write it without that, {INSTEAD}"
                )


def _eager(site: Site, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of forward, and the arguments that it writes to and does not return."""
    try:
        with torch.no_grad(), applied(site, counts=True) as call, autocast_context(site.autocast):
            found = call(*tensors)
    except NotInlinedError as reason:
        raise (reason.__cause__ or ExportError(f"{site.func_name} is not portable: {reason}")) from None
    return tensors_of_node(site, found, tensors)


def _random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of a tensor's type: normal, or integers within the tensor's range."""
    shape = tensor.shape
    if tensor.is_floating_point():
        return torch.randn(shape, generator=generator).to(tensor.dtype)
    if tensor.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not tensor.numel():
        return tensor.clone()
    low, high = (int(end) for end in torch.aminmax(tensor))
    return torch.randint(low, high + 1, shape, generator=generator).to(tensor.dtype)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the largest difference beyond rounding; ``None`` without one, infinity for other shapes."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if not expected.numel():
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = actual.to(wide), expected.detach().to(wide)
    tolerance = _TOLERANCES.get(expected.dtype, 0.0)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    same = torch.isclose(one, other, rtol=tolerance, atol=tolerance * 0.1 * scale, equal_nan=True)
    wrong = int((~same).sum())
    if wrong * _ROUNDED <= expected.numel():
        return None
    gaps = (one - other).abs()[~same]
    return float(gaps.nan_to_num(nan=float("inf")).max())
