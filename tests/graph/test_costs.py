"""The costs of nodes: FLOPs as torch's own counter gives them, and the bytes of their tensors."""

from __future__ import annotations

import pytest
import torch
from onnx import TensorProto, helper
from torch.utils.flop_counter import FlopCounterMode

import torch2ort
from tests.support.functions import Square
from torch2ort.graph.costs import Cost, Costs

PRODUCTS = {
    "linear": (torch.nn.Linear(5, 7), torch.randn(3, 5)),
    "linear of a sequence": (torch.nn.Linear(5, 7, bias=False), torch.randn(2, 3, 5)),
    "convolution": (torch.nn.Conv2d(4, 6, 3, groups=2, padding=1), torch.randn(2, 4, 8, 8)),
    "transposed": (torch.nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 5, 5)),
}


def _costs(model, sample, sizes=None, **settings):
    graph = torch2ort.export(model, sample, training=False, **settings).proto.graph
    return Costs(graph, sizes)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_what_torch_counts(name):
    model, sample = PRODUCTS[name]
    with FlopCounterMode(display=False) as counter:
        model(sample)
    products = [
        c.flops for c in _costs(model, sample) if c.kind in ("MatMul", "Gemm", "Conv", "ConvTranspose")
    ]
    assert sum(products) == counter.get_total_flops()


class Model(torch.nn.Module):
    def forward(self, x):
        return Square.apply(x.exp()).T


def test_sizes_that_vary_are_given_or_one():
    shapes = ({0: torch.export.Dim("batch")},)
    for sizes, batch in ((None, 1), ({"batch": 10}, 10)):
        costs = _costs(Model(), torch.randn(3, 4), sizes, dynamic_shapes=shapes)
        assert list(costs) == [
            Cost("Exp", 4 * batch, 32 * batch),
            Cost("com.microsoft::PythonOp", None, 32 * batch),
            Cost("Transpose", 0, 32 * batch),
        ]
        assert costs.free == (set() if sizes else {"batch"})


def test_a_shape_that_is_not_known_has_no_cost():
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    assert list(Costs(graph)) == [Cost("Relu", None, None)]


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        ("2*N + 1", 21),
        ("floor(N/4)", 2),
        ("Max(N, 30)", 30),
        ("E", 1),
        ("__import__('os')", None),
        ("N.__class__", None),
        ("9**9**9", None),
        ("(", None),
    ],
)
def test_sizes_are_arithmetic_and_nothing_of_a_file_is_run(text, flops):
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [text]) for n in "xy"]
    (cost,) = Costs(helper.make_graph([node], "g", values[:1], values[1:]), {"N": 10})
    assert cost.flops == flops
