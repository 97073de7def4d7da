"""What a graph is translated for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.program.decomposition_table import Table

# (a node with all its attributes, ONNX element type of each input by name, and of each output) -> yes or no.
CanRun = Callable[[onnx.NodeProto, Mapping[str, int], Mapping[str, int]], bool]


def _same(table: Table) -> Table:
    return table


def _no_kernel(node: torch.fx.Node) -> bool:
    return False


class GradientSource(enum.Enum):
    """Where the gradients of what a graph computes come from."""

    NOWHERE = "nobody asks for any"
    PROGRAM = "the engine derives them from the traced program, which is kept beside the graph"
    HALVES = (
        "the graph is a forward or backward half of a step, whose operators stay what autograd made of them"
    )


@dataclass(frozen=True)
class GradientRules:
    """What an engine asks of a graph for the sake of gradients; by default nothing.

    Attributes:
        source: where they come from.
        whole: operators that none of torch's decompositions takes apart.
        decompositions: from the decompositions of every graph to those of one that computes gradients.
        needs_kernel: whether a node belongs to PyTorch's kernel although ONNX has a translation, and a user
            may have registered one.
    """

    source: GradientSource = GradientSource.NOWHERE
    whole: frozenset[OpOverload] = frozenset()
    decompositions: Callable[[Table], Table] = _same
    needs_kernel: Callable[[torch.fx.Node], bool] = _no_kernel


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
        training: the mode that is exported.
        in_kernels: names of operators that PyTorch's kernels compute although ONNX has them, where they are
            large: those are faster there on this processor.
        inlines_functions: whether each Function that can be inlined is, besides those that are registered.
        give_bodies: from a graph, its model, a call and its trace to a graph in which calls of Functions have
            bodies that any runtime runs; ``None`` where they call the Functions.
    """

    opset: int
    can_run: CanRun
    gradients: GradientRules = GradientRules()
    rounds_as_eager: bool = False
    has_kernels: bool = True
    has_libraries: bool = False
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict, hash=False)
    training: bool = False
    in_kernels: frozenset[str] = frozenset()
    inlines_functions: bool = False
    give_bodies: Callable[..., Any] | None = None

    @property
    def is_exported(self) -> bool:
        """Whether the graph is one that :class:`torch2ort.ExportedModel` shows and saves.

        Random numbers and normalizations by the batch are ONNX's own operators there.
        """
        is_whole = self.gradients.source in (GradientSource.NOWHERE, GradientSource.PROGRAM)
        return is_whole and self.has_kernels and not self.rounds_as_eager

    @property
    def is_trained(self) -> bool:
        """Whether the engine derives gradients from the traced program."""
        return self.gradients.source is GradientSource.PROGRAM

    @property
    def is_half(self) -> bool:
        """Whether the graph is a half of a step."""
        return self.gradients.source is GradientSource.HALVES
