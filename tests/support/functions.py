"""Functions that the tests share: each shows one habit of users."""

from __future__ import annotations

import torch


class Square(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Affine(torch.autograd.Function):
    """A tensor and a Parameter; backward is not the true derivative, so inlining would show."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 0.5, (grad * x).sum(0) * 2.0


class Constants(torch.autograd.Function):
    """One constant of each kind; their types and values are checked in every run."""

    EXPECTED = (
        True,
        3,
        0.1,
        (1, 2),
        (0.1, 0.2),
        (True, False),
        "mode",
        None,
        [1, "a"],
        {"k": 1.5},
        torch.float32,
    )

    @staticmethod
    def forward(ctx, x, *constants):
        assert constants == Constants.EXPECTED
        assert list(map(type, constants)) == list(map(type, Constants.EXPECTED))
        ctx.scale = constants[2]
        return x * constants[2] + constants[1]

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.scale * 3, *[None] * len(Constants.EXPECTED))


class TwoOutputs(torch.autograd.Function):
    """Two outputs, one of them often unused."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, doubled, summed):
        return doubled * 2 + summed.expand_as(doubled)


class Numpy(torch.autograd.Function):
    """Its body leaves PyTorch, so it cannot be traced and runs on real data only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.numpy() ** 2) * grad


class Noisy(torch.autograd.Function):
    """Draws random numbers in forward."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


class Base(torch.autograd.Function):
    """The parent of :class:`Derived`."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 4.0


class Derived(Base):
    """A subclass of a Function that inherits its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 3.0


def scaled(factor: float) -> type[torch.autograd.Function]:
    """A new class each time, all of one qualified name."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * factor * 10

    return Scaled


class Sum(torch.autograd.Function):
    """Returns the incoming gradient for both arguments."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Centered(torch.autograd.Function):
    """Subtracts the mean over the second dimension, as that of each sequence."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)
