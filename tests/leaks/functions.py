"""Functions of each style, whose steps are measured."""

from __future__ import annotations

import torch
from torch.autograd import Function


class Saves(Function):
    """Saves its input, an intermediate and its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        z = y * x
        ctx.save_for_backward(x, y, z)
        return z

    @staticmethod
    def backward(ctx, grad):
        _, y, z = ctx.saved_tensors
        return grad * (y + z)


class Notes(Function):
    """Stores tensors as attributes of ctx, its output among them: a cycle in eager PyTorch."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.y, ctx.all = x, x.exp(), [x, {"x": x * 2}]
        return ctx.y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y


class Marks(Function):
    """Returns an output without a gradient, which is also saved."""

    @staticmethod
    def forward(ctx, x):
        y, place = x.sort()
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        return y, place

    @staticmethod
    def backward(ctx, grad, _):
        (place,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, place, grad)


class Unmaterialized(Function):
    """Has an output that is unused and so has no gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        assert second is None
        return first * 2


class SetsUp(Function):
    """In the style of ``setup_context``."""

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class RunsAgain(Function):
    """Runs autograd in its backward, over a graph that it makes there."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(x.sin(), x, grad, create_graph=True)
        return found.detach()


class KeepsGraph(Function):
    """Keeps an autograd graph from forward for its backward."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        (found,) = torch.autograd.grad(ctx.y, ctx.x, grad)
        return found


class RaisesInBackward(Function):
    """Saves a tensor, and fails."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no gradient")


class WritesInPlace(Function):
    """Writes into its input, and returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class GivesViews(Function):
    """Returns a view of its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


ALL = (Saves, Notes, Marks, Unmaterialized, SetsUp, RunsAgain, KeepsGraph, WritesInPlace, GivesViews)
