"""A decomposed program may be valid for only some of the sizes that it was traced for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.sizes.unbacked_sizes import added_conditions, conditions


class Sine(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sin() + y[0]


def added(ask: Callable[[torch.Tensor], bool], dims: dict[int, torch.export.Dim]) -> list[str]:
    """The conditions that a decomposition adds by a query of its argument's size."""

    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x - torch.pi / 2) if ask(x) else torch.cos(torch.pi / 2 - x)

    program = torch.export.export(Sine(), (torch.ones(6, 9), torch.ones(2, 9)), dynamic_shapes=(dims, None))
    known = conditions(program.graph)
    program.run_decompositions({torch.ops.aten.sin.default: sine})
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return added_conditions(program.graph, known, inputs)


ROWS = torch.export.Dim("rows", max=64)


@pytest.mark.parametrize(
    ("ask", "condition"),
    [
        (lambda x: x.shape[0] > 4, "size(0, 0) > 4"),
        (lambda x: x.shape[0] > 7, "size(0, 0) <= 7"),
        (lambda x: x.shape[0] % 4 == 2, "(size(0, 0) % 4) == 2"),
        (lambda x: x.shape[0] // 2 != 3, "(size(0, 0) // 2) == 3"),
    ],
)
def test_a_decomposition_that_asks_for_a_size_adds_a_condition(
    ask: Callable[[torch.Tensor], bool], condition: str
) -> None:
    assert added(ask, {0: ROWS}) == [condition]


def test_a_decomposition_that_asks_for_a_fixed_size_adds_none() -> None:
    assert added(lambda x: x.shape[1] > 4, {0: ROWS}) == []


def test_a_condition_on_what_no_size_of_an_input_is_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError) as raised:
        added(lambda x: x.shape[0] > 4, {0: 2 * ROWS})
    assert str(raised.value).startswith(
        "an operator of the model can be translated for some only of the sizes that were to vary ("
    )
    assert str(raised.value).endswith("). Export with these sizes fixed")
