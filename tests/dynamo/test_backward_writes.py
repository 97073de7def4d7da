"""A traced Function whose backward writes to a buffer is refused before the first step."""

from __future__ import annotations

import pytest
import torch

from torch2ort.errors import UnsupportedOperatorError


class Both(torch.autograd.Function):
    """Forward and backward write to the buffer."""

    @staticmethod
    def forward(ctx, x, seen):
        seen.copy_(torch.maximum(seen, x.detach().abs().sum()))
        ctx.seen = seen
        return x * seen

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.add_(grad.abs().sum())
        return grad * 0.5, None


class Saved(torch.autograd.Function):
    """Backward writes to a tensor of ``saved_tensors``."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.save_for_backward(seen)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[0].add_(grad.abs().sum())
        return grad * 0.5, None


class Attribute(torch.autograd.Function):
    """Backward writes to an attribute of ``ctx``."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.add_(grad.abs().sum())
        return grad * 0.5, None


class Model(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = torch.nn.Linear(4, 4), function
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.function.apply(self.linear(x), self.seen)


@pytest.mark.parametrize("function", [Both, Saved, Attribute])
def test_a_write_in_backward_is_refused(function) -> None:
    torch.compiler.reset()
    model = torch.compile(Model(function), backend="torch2ort")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        model(torch.ones(3, 4))
    assert isinstance(caught.value.inner_exception, UnsupportedOperatorError)
    assert str(caught.value.inner_exception) == (
        "backward writes to a tensor that the compiled code is given (a float32 of shape ()), which no graph "
        "here does. Keep the Function that does so opaque, with options={'keep_functions': True}, "
        "or write to the tensor in forward"
    )
