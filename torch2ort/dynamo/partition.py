"""The partition of AOTAutograd's joint graph into forward and backward."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.dynamo.activation_checkpointing import run_once
from torch2ort.dynamo.recomputed_views import repeat_views
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.meta_dtype_fixes import fix_fake_dtypes
from torch2ort.program.kernel_sites import is_random
from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD
from torch2ort.support.provenance import source_line


def partition(
    joint: torch.fx.GraphModule, inputs: Any, *, redraws: bool, num_fwd_outputs: int, **others: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split a joint graph into the forward and the backward of eager PyTorch.

    Args:
        joint: the graph.
        inputs: its inputs.
        redraws: the result of :func:`.activation_checkpointing.redraws_in_backward` for its code.
        num_fwd_outputs: the number of its results that are forward's.
        others: further arguments that AOTAutograd passes to its partitioner.

    Raises:
        UnsupportedOperatorError: backward draws random numbers or writes to a tensor of forward, or
            eager PyTorch's second run of checkpointed code differs from its first one.
    """
    fix_fake_dtypes(joint.graph)
    nodes = private.of_backward(joint)
    for node in nodes:
        _refuse_in_backward(node)
    _refuse_writes(joint, num_fwd_outputs, nodes)
    run_once(joint, num_fwd_outputs, redraws=redraws)
    repeat_views(joint, num_fwd_outputs)
    forward, backward = private.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
    _leave_to_forward(backward.graph)
    return forward, backward


def _refuse_in_backward(node: torch.fx.Node) -> None:
    if is_random(node):
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} draws random numbers in backward, which no graph here "
            f"does. Keep the Function that does so opaque, with options={{'keep_functions': True}}"
        )


def _refuse_writes(joint: torch.fx.GraphModule, outputs: int, backward: Collection[torch.fx.Node]) -> None:
    """Raise an error for a backward that writes to an input of forward, even if forward writes to it, too."""
    for node in backward:
        if isinstance(node.target, private.OpOverload) and node.target._schema.is_mutable:
            written: Any = node.args[0]
            break
    else:
        written = next((n for n, value in private.writes_of(joint, outputs) if value in backward), None)
    if written is not None:
        raise UnsupportedOperatorError(
            f"backward writes to a tensor that the compiled code is given (a {_kind(written)}), which no "
            f"graph here does. Keep the Function that does so opaque, with "
            f"options={{'keep_functions': True}}, or write to the tensor in forward"
        )


def _kind(node: torch.fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _leave_to_forward(graph: torch.fx.Graph) -> None:
    """Remove from a backward the unused copies of forward's nodes with side effects, and their operands."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target is not PYTHON_OP_GRAD and not node.users:
            graph.erase_node(node)
