"""Sums of products with one tensor become one product."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode  # the values of a program's nodes

from torch2ort.program.sparsity.merge_products import merge_products

aten = torch.ops.aten


def program(
    shapes: list[tuple[int, ...]], *, biases: int = 0, used_twice: bool = False
) -> torch.fx.GraphModule:
    """Return ``linear(x, a) + linear(x, b)`` for weights of some shapes."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    sizes = [(6, 4), *shapes, *([(5,)] * biases)]
    given = []
    for i, shape in enumerate(sizes):
        given.append(graph.placeholder(f"given_{i}"))
        with mode:
            given[-1].meta["val"] = torch.empty(shape)
    products = []
    for i in range(2):
        bias = given[3 + i] if i < biases else None
        products.append(graph.call_function(aten.linear.default, (given[0], given[1 + i], bias)))
    total = graph.call_function(aten.add.Tensor, tuple(products))
    for node in (*products, total):
        with mode:
            node.meta["val"] = torch.empty(6, shapes[0][0])
    graph.output((total, products[0]) if used_twice else (total,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def num_products(module: torch.fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.linear.default))


@pytest.mark.parametrize("biases", [0, 1, 2])
def test_one_product_has_the_sum_of_both(biases: int) -> None:
    module = program([(5, 4), (5, 4)], biases=biases)
    given = [torch.randn(n.meta["val"].shape) for n in module.graph.find_nodes(op="placeholder")]
    expected = module(*given)
    merge_products(module.graph)
    module.recompile()
    assert num_products(module) == 1
    torch.testing.assert_close(module(*given), expected)


def test_weights_that_broadcast_stay_apart() -> None:
    module = program([(5, 4), (1, 4)])
    merge_products(module.graph)
    assert num_products(module) == 2


def test_a_product_that_is_read_elsewhere_stays() -> None:
    module = program([(5, 4), (5, 4)], used_twice=True)
    merge_products(module.graph)
    assert num_products(module) == 2
