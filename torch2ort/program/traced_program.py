"""The operators of a call as torch.export traced them, for engines that differentiate them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch2ort.capture.sample_call import PREFIX
from torch2ort.errors import ExportError
from torch2ort.graph.graph import GraphSignature

if TYPE_CHECKING:
    # They take long to import, and a start from the cache does not need them.
    from torch2ort.capture.trace import Trace
    from torch2ort.sizes.unbacked_sizes import Conditions


@dataclass(frozen=True)
class Constant:
    """A tensor of a program that is not fed to its graph.

    Attributes:
        value: the tensor.
        owner: its name in the model, which may change it; empty for a tensor that the code itself creates.
    """

    value: torch.Tensor
    owner: str = ""


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch.export traced it: not functional yet, each call of a Function opaque.

    Attributes:
        graph_module: the program.
        feeds: one entry per placeholder: the name of the graph's feed, or a constant of the program.
        sites: the calls in it, which this object keeps alive.
        conditions: the number of conditions on sizes in the graph's description; passes may add some.
    """

    graph_module: torch.fx.GraphModule
    feeds: tuple[str | Constant, ...]
    sites: tuple[object, ...]
    conditions: Conditions

    def wants_gradients(self, requires_grad: frozenset[str]) -> list[bool]:
        """Return for each placeholder whether a gradient is wanted.

        Args:
            requires_grad: names of the feeds that require gradients.
        """
        return [isinstance(feed, str) and feed in requires_grad for feed in self.feeds]


def kept_program(traced: Trace) -> torch.fx.GraphModule:
    """Return a copy of a trace's program, as translation changes the program."""
    copied: torch.fx.GraphModule = copy.deepcopy(traced.program.graph_module)
    return copied


def placeholder_origins(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Return placeholder -> name of the parameter, buffer or constant that is fed to it."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def traced_program(graph_module: torch.fx.GraphModule, traced: Trace, graph: GraphSignature) -> TracedProgram:
    """Build the data that an engine needs to differentiate a program.

    Args:
        graph_module: the result of :func:`kept_program`.
        traced: the trace.
        graph: names of the graph that it is translated to.

    Raises:
        ExportError: a placeholder is no tensor.
    """
    origins = placeholder_origins(traced.program)
    fed = {origin: name for name, origin in graph.weights.items()}
    inputs = iter(graph.inputs)
    feeds: list[str | Constant] = []
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        origin = origins.get(node.name)
        if origin is None:
            feeds.append(next(inputs))
        elif origin.startswith(PREFIX) and origin.removeprefix(PREFIX) in fed:
            feeds.append(fed[origin.removeprefix(PREFIX)])
        else:
            feeds.append(_constant(traced.program, origin))
    return TracedProgram(graph_module, tuple(feeds), tuple(traced.sites.values()), traced.conditions)


def _constant(program: torch.export.ExportedProgram, origin: str) -> Constant:
    value = program.constants.get(origin, program.state_dict.get(origin))
    if not isinstance(value, torch.Tensor):
        raise ExportError(
            f"forward reads {origin.removeprefix(PREFIX)!r}, a {type(value).__name__}, which the joint "
            f"engine cannot feed to a graph. Make it a tensor of the model"
        )
    owner = origin.removeprefix(PREFIX) if origin.startswith(PREFIX) else ""
    return Constant(value.detach(), owner)
