"""The cost of one call of a Function through the native policy alone, as a ratio to eager PyTorch."""

from __future__ import annotations

import torch
from _timing import interleaved_medians
from torch import Tensor

from torch2ort.pythonop.native import native


class Tiny(torch.autograd.Function):
    """A minimal Function that saves a tensor: its cost is that of the call."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (_x,) = ctx.saved_tensors
        return grad * 0.99, None


def make_site() -> native.Site:
    """The site of ``Tiny.apply(x, 0.99)``."""
    return native.Site(
        name="Tiny",
        key="tiny",
        forward=Tiny.forward,
        backward=Tiny.backward,
        arguments=(None, 0.99),
        tensor_positions=(0,),
        needs_input_grad=(True, False),
        input_dtypes=("float32",),
        outputs=(None,),
        tensor_outputs=(0,),
        output_dtypes=("float32",),
        output_ranks=(2,),
        returns_tuple=False,
        training=True,
    )


def native_call(site: native.Site, x: Tensor, grad: Tensor) -> Tensor | None:
    """Forward and backward of `site` in a run of their own."""
    run = native.Run()
    native.begin(run)
    native.call_forward(site, [x])
    (found,) = native.call_backward(site, [grad])
    run.clear()
    return found


@torch.enable_grad()
def eager_call(x: Tensor, grad: Tensor) -> Tensor:
    """The same by autograd: ``apply``, and one pass of the engine."""
    (found,) = torch.autograd.grad(Tiny.apply(x, 0.99), x, grad)
    return found


def plain_call(x: Tensor, grad: Tensor) -> Tensor:
    """The arithmetic alone."""
    _ = x * 0.99
    return grad * 0.99


def main() -> None:
    """Check that all functions agree, time them, and print one line."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, leaf, grad = torch.randn(4, 8), torch.randn(4, 8).requires_grad_(), torch.randn(4, 8)
    site = make_site()
    with torch.no_grad():
        torch.testing.assert_close(native_call(site, x, grad), eager_call(leaf, grad))
        ways = {
            "native": lambda: native_call(site, x, grad),
            "plain": lambda: plain_call(x, grad),
            "eager": lambda: eager_call(leaf, grad),
        }
        seconds = interleaved_medians(ways, rounds=500, calls=20)
    alone = {name: seconds[name] - seconds["plain"] for name in seconds}
    print(
        "One tiny Function, forward + backward, 1 thread, ratio to eager: native policy "
        f"{seconds['native'] / seconds['eager']:.2f} (without the arithmetic "
        f"{alone['native'] / alone['eager']:.2f})"
    )


if __name__ == "__main__":
    main()
