"""Operators that autograd differentiates in a trace, where PyTorch has Python formulas for traces alone.

In a trace, PyTorch decomposes operators that eager computes by one kernel with a derivative of its own:
resizes, shrinks, dropout. The parts round elsewhere, and compare numbers in another type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import decompositions as private
from torch2ort._torch.dispatch import OpOverload, with_data

aten = torch.ops.aten


def eager_kernels() -> contextlib.AbstractContextManager[None]:
    """Keep operators that eager computes by one kernel whole in a decomposition; one thread at a time."""
    # Composites are decomposed by torch.export's tables.
    own = (operator for operator in private.decomposed_for_autograd() if not operator._can_decompose())
    return private.autograd_formulas_replaced(dict.fromkeys(own))


@contextlib.contextmanager
def eager_formulas(*, has_kernels: bool) -> Iterator[None]:
    """Let autograd differentiate the same operators in a trace as in eager; one thread at a time.

    Args:
        has_kernels: True if PyTorch's kernels are available when the graph runs. Without them, a resize is
            decomposed into its parts.
    """
    formulas: dict[OpOverload, Callable[..., Any] | None] = {
        aten.dropout.default: _dropout,
        aten.affine_grid_generator_backward.default: _affine_grid_backward,
    }
    if has_kernels:
        formulas |= dict.fromkeys(private.decomposed_for_autograd())
        formulas |= {operator: _resized(operator) for operator in private.resizes()}
    with private.autograd_formulas_replaced(formulas), private.symbolic_resizes():
        yield


def _resized(operator: OpOverload) -> Callable[..., torch.Tensor]:
    """Return a function that calls the kernel for the size that the arguments determine."""
    kernel = getattr(aten, operator._schema.name.removeprefix("aten::")).default
    names = [argument.name for argument in operator._schema.arguments]

    def resized(*args: Any, **kwargs: Any) -> torch.Tensor:
        given: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        scales = given["scale_factors"]
        size = private.resized_size(given["input"].shape, given["output_size"], scales)
        corners = [given["align_corners"]] if "align_corners" in given else []
        return kernel(given["input"], size, *corners, *(scales or [None] * len(size)))  # type: ignore[no-any-return]

    return resized


def _affine_grid_backward(grad: torch.Tensor, size: Sequence[Any], align_corners: bool) -> torch.Tensor:
    """Compute in Python what PyTorch computes in C++, where sizes may not vary."""
    batch, space = size[0], list(size[2:])
    lines = [_from_minus_one(grad, steps, align_corners) for steps in space]
    # The last dimension contains the first coordinate.
    lines = [line.view([-1] + [1] * i) for i, line in enumerate(reversed(lines))]
    points = torch.stack([line.expand(space) for line in (*lines, grad.new_ones(()))], -1)
    points = points.view(-1, len(space) + 1).expand(batch, -1, -1)
    return points.transpose(1, 2).bmm(grad.reshape(batch, -1, len(space))).transpose(1, 2)


def _from_minus_one(like: torch.Tensor, steps: Any, align_corners: bool) -> torch.Tensor:
    if steps <= 1:
        return like.new_zeros(1)
    line = torch.linspace(-1, 1, steps, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (steps - 1) / steps


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return input.clone()
    if input.device.type == "cpu":
        return _Dropout.apply(input, p)  # type: ignore[no-any-return]
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


class _Dropout(torch.autograd.Function):
    """Dropout that saves a mask, and multiplies gradients by forward's noise, rounded to their type."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, p: float) -> torch.Tensor:
        output, mask = aten.native_dropout(input, p, True)
        ctx.save_for_backward(mask)
        ctx.p = p
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,), (grad,) = ctx.saved_tensors, grads
        return aten.native_dropout_backward(grad, mask, _noise(ctx.p, grad.dtype)), None


def _noise(p: float, dtype: torch.dtype) -> float:
    """Return the value of the noise of eager's dropout where it is not zero."""
    if p == 1:
        return 0.0
    with with_data():
        return torch.ones((), dtype=dtype).div_(1 - p).item()
