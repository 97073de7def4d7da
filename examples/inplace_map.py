"""Declare that a custom Function's output shares its input's memory, which saves the copy between the two.

onnxruntime may overwrite memory that no operator reads any more. If a Function returns (a view of) its
argument without declaring it, torch2ort copies the output, and warns with the map to declare.
Run it with ``python examples/inplace_map.py``. Beside that warning, it prints:

    before: the output differs from eager's by 0.0e+00
      input and output: two pieces of memory
      maps: {}
    after: the output differs from eager's by 0.0e+00
      input and output: the same memory
      maps: {'tensor_reuse_map': [-1, 0]}
    a map that is not true: __main__.Sign: the in-place map says that output 0 of forward is the memory of ...
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torch2ort

ADDRESSES: list[int] = []


class ScaleGradient(torch.autograd.Function):
    """The identity; only the gradient is scaled."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ADDRESSES.append(x.data_ptr())  # of its input
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ADDRESSES.append(x.data_ptr())  # of ScaleGradient's output
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clone()


class Model(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Sign.apply(ScaleGradient.apply(super().forward(x), 0.1))


def show(title: str, model: nn.Module, x: Tensor) -> None:
    """Run `model`, and print its difference from eager, the memory of ScaleGradient, and its map."""
    module = torch2ort.ORTModule(model)
    module(x)  # the first run observes what each Function returns
    output = module(x)
    given, made = ADDRESSES[-2:]
    print(f"{title}: the output differs from eager's by {(output - model(x)).abs().max():.1e}")
    print(f"  input and output: {'the same memory' if given == made else 'two pieces of memory'}")
    attributes = [attribute for node in module.exported.proto.graph.node for attribute in node.attribute]
    print(f"  maps: { {a.name: list(a.ints) for a in attributes if a.name == 'tensor_reuse_map'} }")


if __name__ == "__main__":
    torch.manual_seed(1)
    model, x = Model(8, 8), torch.randn(3, 8)
    show("before", model, x)
    torch2ort.register_inplace_map(ScaleGradient, forward={0: 0})
    show("after", model, x)
    torch2ort.register_inplace_map(Sign, forward={0: 0})
    try:
        torch2ort.export(model, x)
    except torch2ort.InplaceMapError as error:
        print(f"a map that is not true: {error}")
