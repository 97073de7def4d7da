"""Recurrent layers unrolled to their steps, as autograd cannot differentiate their operators in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.recurrent import is_recurrent, original
from torch2ort.program.fx_inline import inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.kernel_sites import arguments_of
from torch2ort.support.provenance import source_line

aten = torch.ops.aten


def unroll(graph: torch.fx.Graph) -> None:
    """Replace the operators of recurrent layers by their steps.

    Args:
        graph: changed in place.

    Raises:
        UnsupportedOperatorError: one has a varying length, or dropout between its layers.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_recurrent(node.target):
            continue
        arguments = arguments_of(node)
        _refuse(node, arguments)
        states = arguments["hx"]
        states = list(states) if isinstance(states, (list, tuple)) else [states]
        tensors = [arguments["input"], *states, *arguments["params"]]
        run = _runner(str(original(node.target)), arguments, len(states))
        with graph.inserting_before(node):
            results = inline(graph, run, tensors)
        replace_call(node, results)


def _refuse(node: torch.fx.Node, arguments: dict[str, Any]) -> None:
    length = arguments["input"].meta["val"].shape[1 if arguments["batch_first"] else 0]
    if not isinstance(length, int):
        raise UnsupportedOperatorError(
            f"{original(node.target)} at {source_line(node)} has a length that varies, and a training step "
            f"as a file has a node for each step of it. Export with that size fixed"
        )
    if arguments["dropout"] and arguments["train"] and arguments["num_layers"] > 1:
        raise UnsupportedOperatorError(
            f"{original(node.target)} at {source_line(node)} has dropout between its layers. Make each layer "
            f"a module of its own, with torch.nn.Dropout between them"
        )


def _runner(name: str, arguments: dict[str, Any], states: int) -> Callable[..., Sequence[torch.Tensor]]:
    cell = next(c for key, c in _CELLS.items() if key in name)
    biased, bidirectional = arguments["has_biases"], arguments["bidirectional"]
    layers, first = arguments["num_layers"], arguments["batch_first"]
    directions = 2 if bidirectional else 1

    def run(input: torch.Tensor, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        starts, weights = tensors[:states], tensors[states:]
        each = len(weights) // (layers * directions)
        sequence = input.transpose(0, 1) if first else input
        ends: list[list[torch.Tensor]] = [[] for _ in range(states)]
        for layer in range(layers):
            parts = []
            for direction in range(directions):
                at = layer * directions + direction
                own = weights[at * each : (at + 1) * each]
                begin = [start[at] for start in starts]
                output, end = _layer(cell, sequence, begin, own, biased, backwards=direction == 1)
                parts.append(output)
                for found, value in zip(ends, end, strict=True):
                    found.append(value)
            sequence = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        output = sequence.transpose(0, 1) if first else sequence
        return [output, *(torch.stack(found) for found in ends)]

    return run


def _layer(
    cell: Callable[..., list[torch.Tensor]],
    sequence: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biased: bool,
    *,
    backwards: bool,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    biases = weights[2:4] if biased else (None, None)
    # The operators that all steps share come first: the size of a file and the time of an export grow with
    # the operators of each step.
    weight = weights[1].t()
    projection = [matrix.t() for matrix in weights[4 if biased else 2 :]]
    given = torch.nn.functional.linear(sequence, weights[0], biases[0])
    bias = biases[1]
    if bias is not None and cell is not _gru:
        given, bias = given + bias, None
    outputs = []
    # Split at once: the gradient of a single select would be as large as the whole tensor.
    parts = given.unbind(0)
    for part in reversed(parts) if backwards else parts:
        state = cell(part, state, weight, bias)
        if projection:
            state = [state[0] @ projection[0], *state[1:]]
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs), state


def _lstm(given: torch.Tensor, state: Sequence[torch.Tensor], weight: Any, _: Any) -> list[torch.Tensor]:
    gates = given + state[0] @ weight
    i, f, g, o = gates.chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(cell), cell]


def _gru(given: torch.Tensor, state: Sequence[torch.Tensor], weight: Any, bias: Any) -> list[torch.Tensor]:
    ours = state[0] @ weight if bias is None else torch.addmm(bias, state[0], weight)
    given_r, given_z, given_n = given.chunk(3, -1)
    our_r, our_z, our_n = ours.chunk(3, -1)
    reset, update = torch.sigmoid(given_r + our_r), torch.sigmoid(given_z + our_z)
    new = torch.tanh(given_n + reset * our_n)
    return [(state[0] - new) * update + new]


def _rnn(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def cell(given: torch.Tensor, state: Sequence[torch.Tensor], weight: Any, _: Any) -> list[torch.Tensor]:
        return [function(given + state[0] @ weight)]

    return cell


_CELLS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}
