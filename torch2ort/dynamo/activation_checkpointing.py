"""Checkpointed code: the nodes that backward recomputes, and those that it must not recompute.

Eager PyTorch reruns the whole code in backward, with the random numbers of the first run. A graph here draws
random numbers and calls Functions in forward alone, and saves their results for backward. Where eager's
second run has other results or effects than its first, an error names the code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from torch2ort._torch import dynamo as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.node_dependencies import ancestors
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP
from torch2ort.support.provenance import source_line

_COPY = torch.ops.aten.copy.default


def redraws_in_backward(graph_module: torch.fx.GraphModule) -> bool:
    """Return True if a graph of dynamo has checkpointed code whose second run draws other random numbers.

    Raises:
        UnsupportedOperatorError: some of that code has no gradient in eager PyTorch, but one in the graph.
    """
    calls = [
        node
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.target is private.CHECKPOINT
    ]
    for node in calls:
        if node.kwargs.get("use_reentrant"):
            _refuse_without_gradient(node)
    return any(node.kwargs.get("preserve_rng_state") is False for node in calls)


def _refuse_without_gradient(node: torch.fx.Node) -> None:
    values = [argument.meta.get("example_value") for argument in node.all_input_nodes]
    required = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    if required and all(isinstance(value, torch.nn.Parameter) for value in required):
        raise UnsupportedOperatorError(
            f"the checkpointed code at {source_line(node)} has no gradient in eager PyTorch, as "
            f"use_reentrant=True checks the arguments alone, and none of them requires one. Call "
            f"torch.utils.checkpoint.checkpoint with use_reentrant=False"
        )


def run_once(joint: torch.fx.GraphModule, outputs: int, *, redraws: bool) -> None:
    """Let backward read the results that random operators and Functions had in forward's checkpointed code.

    Args:
        joint: AOTAutograd's joint graph, whose nodes' metadata for the partitioner is changed.
        outputs: the number of its results that are forward's.
        redraws: the result of :func:`redraws_in_backward` for the graph's code.

    Raises:
        UnsupportedOperatorError: eager's second run differs from its first one.
    """
    if not any(map(private.runs_again, joint.graph.nodes)):
        return
    for written, result in private.writes_of(joint, outputs):
        _refuse_write(written, result)
    for node in joint.graph.nodes:
        if not is_seeded(node) and node.target is not DIFFERENTIABLE_PYTHON_OP:
            continue
        if redraws and private.runs_again(node) and is_random(node):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} draws random numbers in checkpointed code, and eager "
                f"PyTorch draws other ones in backward, as preserve_rng_state is False. Omit that argument"
            )
        private.run_in_forward(node)
        for user in node.users:
            if user.target is operator.getitem:
                private.run_in_forward(user)


def is_seeded(node: torch.fx.Node) -> bool:
    """Return True if torch tags a node's operator as random, whatever the node's arguments are."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _refuse_write(written: torch.fx.Node, result: torch.fx.Node) -> None:
    """Raise an error for checkpointed code that reads a tensor that forward writes to."""
    between = _descendants(written) & ancestors([result])
    for node in written.graph.nodes:
        if private.runs_again(node) and (node in between or written in node.all_input_nodes):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} is checkpointed and reads a tensor that forward "
                f"writes to, as BatchNorm its statistics: eager PyTorch reads and writes it once more in "
                f"backward, a graph does not. Take that part out of the checkpointed code"
            )


def _descendants(start: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the nodes computed from a node; the result of a copy depends on its source alone."""
    found = {start}
    for node in start.graph.nodes:
        read: Iterable[torch.fx.Node] = node.all_input_nodes
        if node.target is _COPY:
            read = [n for n in node.args[1:] if isinstance(n, torch.fx.Node)]
        if not found.isdisjoint(read):
            found.add(node)
    return found - {start}
