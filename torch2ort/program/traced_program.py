"""The traced program behind a graph, for engines that differentiate it themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch2ort.capture.trace import PREFIX, Trace
from torch2ort.errors import ExportError
from torch2ort.graph.graph import GraphSignature
from torch2ort.pythonop import Site


@dataclass(frozen=True)
class Constant:
    """A tensor of a program that is no feed of its graph.

    Attributes:
        value: the tensor.
        owner: its name in the model, which may change it; empty for one that the code itself makes.
    """

    value: torch.Tensor
    owner: str = ""


@dataclass(frozen=True)
class Source:
    """A program as torch.export traced it: not functional yet, each call of a Function opaque.

    Attributes:
        graph_module: the program.
        feeds: one entry per placeholder: the name of the graph's feed, or a constant of the program.
        sites: the calls of Functions, kept alive.
        traced: all else that the trace found.
    """

    graph_module: torch.fx.GraphModule
    feeds: tuple[str | Constant, ...]
    sites: dict[str, Site]
    traced: Trace


class Program:
    """The traced program behind a graph: at hand, or traced again once it is asked for.

    Args:
        again: traces it.
    """

    def __init__(self, again: Callable[[], Source]) -> None:
        self._again: Callable[[], Source] | None = again

    def source(self) -> Source:
        """The program; only before :meth:`forget`."""
        assert self._again is not None
        return self._again()

    def forget(self) -> None:
        """Let go of the program, and of the call that it was traced with."""
        self._again = None


def kept_program(traced: Trace) -> torch.fx.GraphModule:
    """A copy of a trace's program, whose translation changes it."""
    copied: torch.fx.GraphModule = copy.deepcopy(traced.program.graph_module)
    return copied


def origins_of(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Placeholder -> name of the parameter, buffer or constant that it is."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def source_of(graph_module: torch.fx.GraphModule, traced: Trace, graph: GraphSignature) -> Source:
    """What an engine needs to differentiate a program.

    Args:
        graph_module: of :func:`kept_program`.
        traced: the trace.
        graph: names of what it is translated to.

    Raises:
        ExportError: a placeholder is no tensor.
    """
    origins = origins_of(traced.program)
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
    return Source(graph_module, tuple(feeds), traced.sites, traced)


def _constant(program: torch.export.ExportedProgram, origin: str) -> Constant:
    value = program.constants.get(origin, program.state_dict.get(origin))
    if not isinstance(value, torch.Tensor):
        raise ExportError(
            f"forward reads {origin.removeprefix(PREFIX)!r}, a {type(value).__name__}, which the joint "
            f"engine cannot feed to a graph. Make it a tensor of the model"
        )
    owner = origin.removeprefix(PREFIX) if origin.startswith(PREFIX) else ""
    return Constant(value.detach(), owner)
