"""Results of backward that are ``None``, as Functions returned ``None`` for the gradients they depend on.

Eager PyTorch propagates such a ``None`` to the operators before the Function. A backward graph has zeros
instead, so the results that depend on nothing else are determined from the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD
from torch2ort.pythonop.site import needed_inputs, site_by_key

Edge = tuple[str, int]  # the key of a site and the position of an argument of its Function


class _Step(NamedTuple):
    """A node of a backward through which gradients propagate.

    Attributes:
        call: key of the site whose backward it is; empty for an operator.
        gradients: steps whose gradients are its inputs; ``None`` for a gradient that never exists.
        left_out: the argument of a Function whose gradient it is; ``None`` if it is no such gradient.
    """

    call: str
    gradients: tuple[int | None, ...]
    left_out: Edge | None


class UndefinedGradients:
    """The paths of gradients through a backward.

    Args:
        graph: the backward, with the derivatives of Functions as traced.
        is_tangent: returns True if a node is the gradient of an output.
    """

    def __init__(self, graph: torch.fx.Graph, is_tangent: Callable[[torch.fx.Node], bool]) -> None:
        self._steps: list[_Step] = []
        numbers: dict[torch.fx.Node, int] = {}
        for node in graph.nodes:
            step = _Step("", (), None) if is_tangent(node) else _step(node, numbers)
            if step is not None:
                numbers[node] = len(self._steps)
                self._steps.append(step)
        results = graph.output_node().args[0]
        self._results = {i: numbers[n] for i, n in enumerate(results) if n in numbers}  # type: ignore[arg-type]

    def results(self, undefined: Collection[Edge]) -> frozenset[int]:
        """Return the positions of the backward's results that depend on no defined gradient.

        Args:
            undefined: arguments for which a Function's backward returned ``None``.
        """
        defined = self._are_defined(undefined)
        return frozenset(i for i, number in self._results.items() if not defined[number])

    def defined_output_gradients(self, call: str, undefined: Collection[Edge]) -> tuple[bool, ...] | None:
        """Return for each gradient of a Function's outputs whether autograd passes a defined one.

        Args:
            call: key of its site.
            undefined: as for :meth:`results`.

        Returns:
            One bool per tensor that forward returned; ``None`` if the graph does not contain the call.
        """
        step = next((step for step in self._steps if step.call == call), None)
        if step is None:
            return None
        defined = self._are_defined(undefined)
        return tuple(number is not None and defined[number] for number in step.gradients)

    def _are_defined(self, undefined: Collection[Edge]) -> list[bool]:
        defined: list[bool] = []
        for step in self._steps:
            arrived = any(number is not None and defined[number] for number in step.gradients)
            # A Function's backward is called also without a defined gradient, as in autograd.
            is_source = bool(step.call) or not step.gradients
            defined.append((arrived or is_source) and step.left_out not in undefined)
        return defined


def _step(node: torch.fx.Node, numbers: dict[torch.fx.Node, int]) -> _Step | None:
    """Return the step of a node; ``None`` if no gradient reaches it."""
    if node.target is PYTHON_OP_GRAD:
        given: Any = node.args[1]
        return _Step(str(node.args[2]), tuple(numbers.get(gradient) for gradient in given), None)
    arriving = tuple(numbers[n] for n in node.all_input_nodes if n in numbers)
    if not arriving or node.op == "output":
        return None
    return _Step("", arriving, _left_out(node))


def _left_out(node: torch.fx.Node) -> Edge | None:
    """Return the argument of a Function whose gradient a node selects from the results of its backward."""
    if node.target is not operator.getitem:
        return None
    call, i = node.args
    if not isinstance(call, torch.fx.Node) or call.target is not PYTHON_OP_GRAD:
        return None
    site = site_by_key(str(call.args[2]))
    return site.key, site.tensor_positions[needed_inputs(site)[i]]  # type: ignore[index]
