"""What a graph is translated for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
import torch

from torch2ort.symbolics._torch_private import OpOverload
from torch2ort.symbolics.decompositions.registry import Table

# (a node with all its attributes, ONNX element type of each input by name, and of each output) -> yes or no.
CanRun = Callable[[onnx.NodeProto, Mapping[str, int], Mapping[str, int]], bool]


def _same(table: Table) -> Table:
    return table


def _not_preferred(node: torch.fx.Node) -> bool:
    return False


def _no_kernel(node: torch.fx.Node, gradient: frozenset[torch.fx.Node]) -> bool:
    return False


def _nothing(node: torch.fx.Node) -> None:
    return None


def _as_it_is(model: ir.Model, trained: frozenset[str]) -> None:
    return None


def _none_wrong(model: ir.Model, trained: frozenset[str]) -> dict[str, str]:
    return {}


def _complete(model: ir.Model) -> None:
    return None


class GradientSource(enum.Enum):
    """Where the gradients of what a graph computes come from."""

    NOWHERE = "nobody asks for any"
    GRAPH = "the engine derives them from the graph, so that every operator needs a right one there"
    PROGRAM = "the engine derives them from the traced program, which is kept beside the graph"
    HALVES = (
        "the graph is a forward or backward half of a step, whose operators stay what autograd made of them"
    )


@dataclass(frozen=True)
class GradientRules:
    """What an engine asks of a graph for the sake of gradients; by default nothing.

    Attributes:
        source: where they come from.
        engine: its name, for errors.
        whole: operators that none of torch's decompositions takes apart.
        decompositions: from the decompositions of every graph to those of one that is differentiated.
        prefers_kernel: whether a node belongs to PyTorch's kernel although ONNX has a translation, unless a
            user registered one.
        needs_kernel: the same, and goes before what a user registered; given the nodes that carry a gradient,
            too.
        refuse: raises UnsupportedOperatorError where the engine cannot train a node that carries a gradient.
        rewrite: changes in place what stands on the way of a gradient; given the graph and the names of the
            initializers and inputs that require one.
        untrainable: given the same, the name of the FX node behind each node that still stands there -> why.
        complete: the last change in place, when weights are inputs.
    """

    source: GradientSource = GradientSource.NOWHERE
    engine: str = ""
    whole: frozenset[OpOverload] = frozenset()
    decompositions: Callable[[Table], Table] = _same
    prefers_kernel: Callable[[torch.fx.Node], bool] = _not_preferred
    needs_kernel: Callable[[torch.fx.Node, frozenset[torch.fx.Node]], bool] = _no_kernel
    refuse: Callable[[torch.fx.Node], None] = _nothing
    rewrite: Callable[[ir.Model, frozenset[str]], None] = _as_it_is
    untrainable: Callable[[ir.Model, frozenset[str]], dict[str, str]] = _none_wrong
    complete: Callable[[ir.Model], None] = _complete


@dataclass(frozen=True)
class Target:
    """What the engine that will run a graph can do, as far as its translation asks.

    Attributes:
        opset: version of ONNX's own operators.
        can_run: whether the engine has a kernel for a node.
        rounds_as_eager: whether what computes in half precision runs in PyTorch's kernels, so that it rounds
            where eager rounds; else ONNX Runtime computes it in float32, within bounds that docs/precision.md
            gives.
        gradients: what the engine asks for the sake of gradients.
        has_kernels: whether PyTorch's kernels are there when the graph runs. Where they are not, what ONNX's
            own operators cannot do is refused.
        has_libraries: whether operators of libraries are registered when the graph runs, as in the process
            that made it.
        translations: of operators that are translated for this target otherwise than for all.
        inlines_functions: whether each Function that can be inlined is, besides those that are registered.
    """

    opset: int
    can_run: CanRun
    gradients: GradientRules = GradientRules()
    rounds_as_eager: bool = False
    has_kernels: bool = True
    has_libraries: bool = False
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict, hash=False)
    inlines_functions: bool = False

    @property
    def differentiates(self) -> bool:
        """Whether the engine derives gradients from the graph."""
        return self.gradients.source is GradientSource.GRAPH

    @property
    def keeps_program(self) -> bool:
        """Whether the engine derives gradients from the traced program."""
        return self.gradients.source is GradientSource.PROGRAM

    @property
    def is_trained(self) -> bool:
        """Whether an engine gets gradients, of the graph or of the program behind it."""
        return self.differentiates or self.keeps_program

    @property
    def is_half(self) -> bool:
        """Whether the graph is a half of a step."""
        return self.gradients.source is GradientSource.HALVES
