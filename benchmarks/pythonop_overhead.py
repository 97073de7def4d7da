"""What 50 tiny Functions cost on ONNX Runtime, as a ratio to eager PyTorch in the same run."""

from __future__ import annotations

import copy

import torch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

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
    """Check that both ways agree, time them, and print one line."""
    x = torch.randn(4, 8)
    chain, empty = Chain(FUNCTIONS, spaced=spaced), Chain(0)
    modules = {
        "eager": chain,
        "ort": torch2ort.ORTModule(copy.deepcopy(chain)),
        "eager_empty": empty,
        "ort_empty": torch2ort.ORTModule(copy.deepcopy(empty)),
    }
    torch.testing.assert_close(step(modules["ort"], x), step(chain, x))
    ways = {name: lambda module=module: step(module, x) for name, module in modules.items()}
    seconds = interleaved_medians(ways, rounds=300, calls=3)
    ratio = seconds["ort"] / seconds["eager"]
    alone = (seconds["ort"] - seconds["ort_empty"]) / (seconds["eager"] - seconds["eager_empty"])
    print(
        f"{FUNCTIONS} Functions{', a tanh behind each' if spaced else ''}, forward + backward, 1 thread, "
        f"ratio to eager: ORTModule {ratio:.2f} (per Function alone {alone:.2f})"
    )


def main() -> None:
    """Compare Functions that follow each other directly, and others."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for spaced in (False, True):
        compare(spaced)


if __name__ == "__main__":
    main()
