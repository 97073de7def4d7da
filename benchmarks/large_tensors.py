"""The cost of a Function with a large tensor beside a small one, where no byte must be copied."""

from __future__ import annotations

import torch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

FUNCTIONS = 50
SIZES = {"1 KiB": 256, "64 MiB": 16 << 20}


class Keep(torch.autograd.Function):
    """Saves a tensor of any size and computes on a small one."""

    @staticmethod
    def forward(ctx, table: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return x * 0.99

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        (_table,) = ctx.saved_tensors
        return None, grad * 0.99


class Chain(nn.Module):
    """``count`` Functions in a row, all on one table."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = Keep.apply(table, x)
        return x.sum()


def main() -> None:
    """Time chains of two lengths with both sizes, and print one line."""
    torch.set_num_threads(1)
    ways = {}
    x = torch.randn(8, requires_grad=True)
    for name, size in SIZES.items():
        table = torch.randn(size)
        for count in (1, 1 + FUNCTIONS):
            module = torch2ort.ORTModule(Chain(count))
            ways[f"{name} {count}"] = lambda m=module, t=table: torch.autograd.grad(m(t, x), x)
    seconds = interleaved_medians(ways, rounds=100, calls=3)
    costs = [seconds[f"{name} {1 + FUNCTIONS}"] - seconds[f"{name} 1"] for name in SIZES]
    small, large = (1e6 * cost / FUNCTIONS for cost in costs)
    print(
        f"a Function that copies nothing, forward + backward, 1 thread: 64 MiB "
        f"{large / small:.2f} of 1 KiB ({large:.1f} and {small:.1f} microseconds)",
        flush=True,
    )


if __name__ == "__main__":
    main()
