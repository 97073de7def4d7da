"""What 50 tiny Functions cost on ONNX Runtime, as a ratio to eager PyTorch in the same run."""

from __future__ import annotations

import time

import torch
from _engines import on_each
from _timing import interleaved_medians
from torch import Tensor, nn

FUNCTIONS = 50


class Tiny(torch.autograd.Function):
    """As little as a Function can do and still save a tensor: all of its cost is the call."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.99

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (_x,) = ctx.saved_tensors
        return grad * 0.99


class Chain(nn.Module):
    """``count`` Functions in a row behind one parameter, with an operator between them if ``spaced``."""

    def __init__(self, count: int, *, spaced: bool = False) -> None:
        super().__init__()
        self.count = count
        self.spaced = spaced
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(self.count):
            x = Tiny.apply(x)
            if self.spaced:
                x = torch.tanh(x)
        return x.sum()


def step(module: nn.Module, x: Tensor) -> Tensor:
    """Run forward and backward, and return the parameter's gradient."""
    module.zero_grad()
    module(x).backward()
    (parameter,) = module.parameters()
    return parameter.grad


def compare(spaced: bool) -> None:
    """Check that all ways agree, time them, and print one line."""
    x = torch.randn(4, 8)
    models = {"": Chain(FUNCTIONS, spaced=spaced), " empty": Chain(0)}
    ways = {}
    for kind, model in models.items():
        for engine, module in {"eager": model, **on_each(model)}.items():
            torch.testing.assert_close(step(module, x), step(model, x))
            ways[engine + kind] = lambda module=module: step(module, x)
    seconds = interleaved_medians(ways, rounds=300, calls=3, clock=time.thread_time)
    alone = {name: seconds[name] - seconds[f"{name} empty"] for name in ways if f"{name} empty" in ways}
    print(
        f"{FUNCTIONS} Functions{', a tanh behind each' if spaced else ''}, forward + backward, 1 thread, "
        f"ratio to eager: "
        + ", ".join(
            f"{engine} {seconds[engine] / seconds['eager']:.2f} "
            f"(per Function alone {cost / alone['eager']:.2f})"
            for engine, cost in alone.items()
            if engine != "eager"
        ),
        flush=True,
    )


def main() -> None:
    """Compare Functions that follow each other directly, and others."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for spaced in (False, True):
        compare(spaced)


if __name__ == "__main__":
    main()
