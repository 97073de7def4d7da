"""LSTMs as oneDNN's layers, which eager PyTorch computes them with.

``aten::lstm`` on the CPU in float32 is a call of ``mkldnn_rnn_layer`` for each layer and direction
(``aten/src/ATen/native/mkldnn/RNN.cpp`` of PyTorch), whose derivative autograd has. As operators of the joint
graph, forward and backward run in C++. A whole LSTM, as one operator, would be differentiated by a graph of
autograd's own in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.program.fx_inline import inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.kernel_sites import arguments_of, is_random
from torch2ort.support.provenance import origin_of

aten = torch.ops.aten
# ``ideep::rnn_kind::LSTM``.
_LSTM = 2
_LAYER = aten.mkldnn_rnn_layer.default


def decompose_lstms(graph: torch.fx.Graph) -> None:
    """Replace calls of LSTMs by calls of their layers, where eager PyTorch runs these.

    Args:
        graph: the nodes of a program; changed in place.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return
    for node in list(graph.nodes):
        if node.target is not torch.ops.torch2ort.lstm.default or is_random(node):
            continue
        arguments = arguments_of(node)
        tensors = [arguments["input"], *arguments["hx"], *arguments["params"]]
        if arguments["autocast"] or not _is_onednns([n.meta["val"] for n in tensors]):
            continue
        with graph.inserting_before(node):
            results = inline(graph, _runner(arguments), tensors, origin=origin_of(node))
        replace_call(node, results)


def settle_workspaces(graph: torch.fx.Graph) -> None:
    """Give the layers' workspaces a size that is known only in a run: in a trace they have no elements.

    Args:
        graph: the joint graph; the values of its nodes are changed.
    """
    for node in graph.nodes:
        if node.target is not _LAYER:
            continue
        *others, workspace = node.meta["val"]
        made = private.vector_of_unbacked_size(workspace)
        node.meta["val"] = (*others, made)
        for user in node.users:
            if user.args[1] == len(others):
                user.meta["val"] = made


def _is_onednns(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if eager PyTorch calls oneDNN for an LSTM over these tensors, whatever their values are."""
    _, hidden, cell, *_ = tensors
    # It does not for tensors without elements, or with projections; sizes that vary may be zero.
    return hidden.shape[-1] == cell.shape[-1] and all(
        t.dtype is torch.float32
        and t.device.type == "cpu"
        and all(isinstance(size, int) and size > 0 for size in t.shape)
        for t in tensors
    )


def _runner(arguments: dict[str, Any]) -> Callable[..., Sequence[torch.Tensor]]:
    """Return a function that runs the layers, from the tensors of the call to its three results."""
    has_biases, layers, train, bidirectional, batch_first = (
        arguments[name] for name in ("has_biases", "num_layers", "train", "bidirectional", "batch_first")
    )
    directions = 2 if bidirectional else 1

    def run(
        input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *params: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        each = len(params) // (layers * directions)
        sequence = (input.transpose(0, 1) if batch_first else input).contiguous()
        ends: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for layer in range(layers):
            parts = []
            for direction in range(directions):
                at = layer * directions + direction
                weights = list(params[at * each : (at + 1) * each])
                if not has_biases:
                    weights += [torch.zeros_like(weight) for weight in weights]
                output, *states, _ = _LAYER(
                    sequence, *weights, hidden[at], cell[at], direction == 1, [], _LSTM, hidden.shape[-1],
                    layers, has_biases, bidirectional, batch_first, train,
                )  # fmt: skip
                parts.append(output)
                for found, state in zip(ends, states, strict=True):
                    found.append(state)
            sequence = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        output = sequence.transpose(0, 1) if batch_first else sequence
        return [output, *map(torch.stack, ends)]

    return run
