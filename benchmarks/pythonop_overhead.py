"""The cost of 50 tiny Functions on ONNX Runtime, as a ratio to eager PyTorch in the same run."""

from __future__ import annotations

import copy
import time

import torch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

FUNCTIONS = 50


class Tiny(torch.autograd.Function):
    """A minimal Function that saves a tensor: its cost is that of the call."""

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
    """Check that all engines agree, time them, and print one line."""
    x = torch.randn(4, 8)
    models = {"": Chain(FUNCTIONS, spaced=spaced), " empty": Chain(0)}
    ways = {}
    for kind, model in models.items():
        ours = torch2ort.ORTModule(copy.deepcopy(model))
        for way, module in {"eager": model, "torch2ort": ours}.items():
            torch.testing.assert_close(step(module, x), step(model, x))
            ways[way + kind] = lambda module=module: step(module, x)
    seconds = interleaved_medians(ways, rounds=300, calls=3, clock=time.thread_time)
    alone = {way: seconds[way] - seconds[f"{way} empty"] for way in ("eager", "torch2ort")}
    print(
        f"{FUNCTIONS} Functions{', a tanh behind each' if spaced else ''}, forward + backward, 1 thread, "
        f"ratio to eager: torch2ort {seconds['torch2ort'] / seconds['eager']:.2f} "
        f"(per Function alone {alone['torch2ort'] / alone['eager']:.2f})",
        flush=True,
    )


def main() -> None:
    """Compare Functions that follow each other directly, and Functions with operators between them."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for spaced in (False, True):
        compare(spaced)


if __name__ == "__main__":
    main()
