"""Outputs that require a gradient, but whose gradient reaches no tensor of the caller's.

A view that is created under ``torch.no_grad()`` from a tensor that requires a gradient requires one, too, but
as a leaf of autograd's graph: results computed from it have a backward, which ends there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort.capture.grad_mode_regions import GradModeRegions
from torch2ort.capture.output_views import makes_views


class DeadEnd(NamedTuple):
    """An output whose gradient reaches no tensor.

    Attributes:
        output: its position.
        leaf: True if it is such a view itself, and not computed from one.
        inputs: the positions of the call's tensors that the views are of.
        weights: the names of the model's tensors that the views are of.
    """

    output: int
    leaf: bool
    inputs: tuple[int, ...]
    weights: tuple[str, ...]


def has_dead_end(output: torch.Tensor) -> bool:
    """Return True if an output of a trace requires a gradient, but autograd's graph of it reaches no leaf."""
    if output.grad_fn is None:
        return output.requires_grad and output._is_view()
    seen: set[Any] = {output.grad_fn}
    waiting = [output.grad_fn]
    while waiting:
        function: Any = waiting.pop()
        if hasattr(function, "variable"):
            return False
        before = {f for f, _ in function.next_functions if f is not None} - seen
        seen |= before
        waiting.extend(before)
    return True


def dead_ends_of(
    program: torch.export.ExportedProgram,
    outputs: Sequence[bool],
    leaves: Sequence[bool],
    prefix: str,
) -> tuple[DeadEnd, ...]:
    """Return the outputs of ``program`` whose gradients reach no tensor.

    Args:
        program: the result of torch.export.
        outputs: :func:`has_dead_end` of each output.
        leaves: for each output, True if it is a leaf of autograd's graph.
        prefix: prefix of the names of parameters and buffers in the program.
    """
    if not any(outputs):
        return ()
    signature, regions = program.graph_signature, GradModeRegions(program.graph_module)
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    returned = last.args[0][len(last.args[0]) - len(outputs) :]
    found: list[DeadEnd] = []
    for i, node in enumerate(returned):
        if outputs[i]:
            names = sorted(n.name for n in _viewed(node, regions))
            given = (signature.user_inputs.index(n) for n in names if n in signature.user_inputs)
            own = (weights[n].removeprefix(prefix) for n in names if n in weights)
            found.append(DeadEnd(i, leaves[i], tuple(given), tuple(own)))
    return tuple(found)


def _viewed(output: Any, regions: GradModeRegions) -> Iterator[torch.fx.Node]:
    """Yield the program's inputs that ``output`` depends on, through views only where gradients are off."""
    seen: set[torch.fx.Node] = set()
    waiting = [output]
    while waiting:
        node = regions.outside(waiting.pop())
        if not isinstance(node, torch.fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            yield node
        elif regions.records(node):
            waiting.extend(node.all_input_nodes)
        elif node.target is operator.getitem or makes_views(node.target):
            waiting.append(node.args[0])


class _Passed(torch.autograd.Function):
    """Identity whose backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a new object."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[None, None]:
        """Return no gradient."""
        return None, None


def put_dead_ends(
    outputs: list[torch.Tensor],
    dead_ends: Sequence[DeadEnd],
    inputs: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Make those of ``outputs`` require a gradient, as in eager PyTorch.

    Args:
        outputs: outputs of the run.
        dead_ends: the dead ends among them.
        inputs: the call's tensors.
        weights: the model's tensors, by name.
    """
    for end in dead_ends:
        output = outputs[end.output]
        viewed = [*(inputs[i] for i in end.inputs), *(weights[n] for n in end.weights)]
        # The view was made on a tensor that the caller has. A view of a view requires a gradient if the
        # tensor that both are of does.
        if output.requires_grad or not any((t if t._base is None else t._base).requires_grad for t in viewed):
            continue
        if end.leaf:
            # In eager it is a view of an ordinary tensor, and remains one in inference mode.
            with torch.inference_mode(False):
                made = output.clone() if output.is_inference() else output.detach()
                outputs[end.output] = made.requires_grad_()
        else:
            anchor = torch.empty(0, device=output.device, requires_grad=True)
            outputs[end.output] = _Passed.apply(output, anchor)
