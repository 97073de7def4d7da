"""The runtime that a graph is translated for."""

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
    """Source of the gradients of a graph's computation."""

    NOWHERE = "no gradients are computed"
    PROGRAM = "the engine derives them from the traced program, which is kept beside the graph"
    HALVES = "the graph is a forward or backward half of a step, with the operators that autograd traced"


@dataclass(frozen=True)
class GradientRules:
    """Requirements of an engine on a graph because of gradients; by default none.

    Attributes:
        source: source of the gradients.
        not_decomposed: operators that none of torch's decompositions may decompose.
        decompositions: from the decompositions of every graph to those of one that computes gradients.
        needs_kernel: returns True if a node must run in PyTorch's kernel although ONNX has a translation, and
            a user may have registered one.
    """

    source: GradientSource = GradientSource.NOWHERE
    not_decomposed: frozenset[OpOverload] = frozenset()
    decompositions: Callable[[Table], Table] = _same
    needs_kernel: Callable[[torch.fx.Node], bool] = _no_kernel


@dataclass(frozen=True)
class Target:
    """Properties of the engine that will run a graph, as far as its translation depends on them.

    Attributes:
        opset: version of ONNX's own operators.
        can_run: returns True if the engine has a kernel for a node.
        rounds_as_eager: True if computations in half precision run in PyTorch's kernels, and so round where
            eager rounds; otherwise ONNX Runtime computes them in float32, within the bounds in
            docs/precision.md.
        gradients: requirements because of gradients.
        has_kernels: True if PyTorch's kernels are available when the graph runs. Otherwise operators that
            ONNX's own operators cannot express are refused.
        has_libraries: True if operators of libraries are registered when the graph runs, as in the process
            that made it.
        translations: translations of operators for this target alone.
        training: the mode that is exported.
        in_kernels: names of operators that PyTorch's kernels compute although ONNX has them, where they are
            large: PyTorch's kernels are faster for those on this processor.
        inlines_functions: True to inline every Function that can be inlined, besides the registered ones.
        give_bodies: from a graph, its model, a call and its trace to a graph in which calls of Functions have
            bodies that any runtime can run; ``None`` where nodes call the Functions.
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
        """True if the graph is one that :class:`torch2ort.ExportedModel` shows and saves.

        Random operators and batch normalizations are ONNX's own operators in it.
        """
        is_whole = self.gradients.source in (GradientSource.NOWHERE, GradientSource.PROGRAM)
        return is_whole and self.has_kernels and not self.rounds_as_eager

    @property
    def is_trained(self) -> bool:
        """True if the engine derives gradients from the traced program."""
        return self.gradients.source is GradientSource.PROGRAM

    @property
    def is_half(self) -> bool:
        """True if the graph is a half of a step."""
        return self.gradients.source is GradientSource.HALVES
