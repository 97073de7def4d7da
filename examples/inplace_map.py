"""Declare that a custom Function's output shares its input's memory, which saves the copy between the two.

onnxruntime may overwrite memory that no operator reads any more. If a Function returns (a view of) its
argument without declaring it, torch2ort copies the output to stay correct, and a warning names the map to
declare. A declared map is part of onnxruntime's allocation plan, and nothing is copied.

Run it with ``python examples/inplace_map.py``.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import torch2ort

ADDRESSES: dict[str, list[int]] = {}


class ScaleGradient(torch.autograd.Function):
    """The identity; only the gradient is scaled."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ADDRESSES["the input of ScaleGradient"] = [x.data_ptr()]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Sign(torch.autograd.Function):
    """The next Function, which records its input's address."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ADDRESSES["its output"] = [x.data_ptr()]
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clone()


class Model(nn.Module):
    """Two Functions in a row between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Sign.apply(ScaleGradient.apply(self.first(x), 0.1)))


def show(title: str, model: nn.Module, x: Tensor) -> None:
    """Train a step, then print the nodes of the graph and whether memory is shared."""
    module = torch2ort.ORTModule(model)
    for _ in range(2):
        model.zero_grad()
        module(x).square().mean().backward()
    gradient = model.first.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    difference = (gradient - model.first.weight.grad).abs().max()

    model.zero_grad()
    module(x)
    assert module.exported is not None
    graph = module.exported.proto.graph
    values = {v.name: v for v in (*graph.value_info, *graph.output)}
    print(f"{title}: {len(graph.node)} nodes, gradients differ from eager's by {difference:.1e}")
    for node in graph.node:
        dims = values[node.output[-1]].type.tensor_type.shape.dim
        maps = {a.name: list(a.ints) for a in node.attribute if a.name.endswith("reuse_map")}
        print(
            f"  {node.op_type:10} [{', '.join(d.dim_param or str(d.dim_value) for d in dims)}] {maps or ''}"
        )
    given, made = ADDRESSES.values()
    print(f"  {' and '.join(ADDRESSES)}: {'the same memory' if given == made else 'two pieces of memory'}")


def main() -> None:
    """Train a step without and with the map, then show the error for a wrong one."""
    torch.manual_seed(1)
    model, x = Model(), torch.randn(3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch2ort.Torch2OrtWarning)
        show("before", model, x)
    for warning in caught:
        if warning.category is torch2ort.Torch2OrtWarning:
            print(f"warning: {warning.message}")

    torch2ort.register_inplace_map(ScaleGradient, forward={0: 0})
    show("after", model, x)

    torch2ort.register_inplace_map(Sign, forward={0: 0})
    try:
        torch2ort.export(model, x)
    except torch2ort.InplaceMapError as error:
        print(f"a map that is not true: {error}")


if __name__ == "__main__":
    main()
