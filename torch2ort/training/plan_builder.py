"""Construction of the plan of a step: a program is differentiated, split and translated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from torch2ort.autotune.alternatives import Rewriting
from torch2ort.autotune.channels_last import compute_channels_last, set_channels_last
from torch2ort.autotune.processor_rule import CONVOLUTIONS
from torch2ort.autotune.tuner import Tuner
from torch2ort.differentiate.aliasing import ReadMemory
from torch2ort.differentiate.constant_sizes import fold_constants
from torch2ort.differentiate.fuse_regions import fuse
from torch2ort.differentiate.grad_reachability import Reach
from torch2ort.differentiate.inline_functions import inline
from torch2ort.differentiate.joint_trace import Joint, refuse_write, trace_joint
from torch2ort.differentiate.lower_step import lower_half
from torch2ort.differentiate.recompute import DEFAULT_SHARE, is_large
from torch2ort.differentiate.registered_gradients import map_calls
from torch2ort.differentiate.split import Half, Split
from torch2ort.differentiate.step_target import half_of
from torch2ort.differentiate.symbolic_shapes import refuse_assumed_of_half
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.graph import GraphSignature
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.program.target import Target
from torch2ort.program.traced_program import Constant, TracedProgram
from torch2ort.pythonop import Site
from torch2ort.sizes.unbacked_sizes import (
    Conditions,
    added_conditions,
    conditions,
    line_of_last_condition,
    lines_of_conditions,
)
from torch2ort.training.step_plan import BackwardPlan, ForwardPlan, arguments_of

# Prefix of the name of a model's tensor that is no feed of the graph.
_OWNED = "model:"
# A condition with this text accepts one size only.
_FIXES = "=="


class Planner:
    """Construction of the plans of one joint graph.

    Args:
        joint: the joint graph.
        feeds: for each input of the program, the feed's position; -1 for a constant.
        target: the target of the exported graph.
        known: how many conditions on sizes the exported graph is known to rely on.
        fuses: returns those of some regions' texts that can run as one kernel each; ``None`` disables fusion.
        tuner: decides by measurement which library computes an operator; ``None`` leaves that to the rule.
        share: fraction of the step's time that backward may spend on recomputing values that are not saved.

    Attributes:
        joint: the joint graph.
        feeds: as given.
    """

    def __init__(
        self,
        joint: Joint,
        feeds: Sequence[int],
        target: Target,
        known: Conditions,
        fuses: Callable[[Sequence[str]], Collection[str]] | None = None,
        tuner: Tuner | None = None,
        share: float = DEFAULT_SHARE,
    ) -> None:
        self.joint, self.feeds = joint, tuple(feeds)
        self._target, self._known, self._tuner = target, known, tuner
        self._split, self._fuses = Split(joint, fuses=fuses is not None, share=share), fuses
        # Sites of fused regions and calls of kernels, kept alive.
        self._made: list[Site] = []

    @classmethod
    def of_program(
        cls,
        signature: GraphSignature,
        source: TracedProgram,
        requires_grad: frozenset[str],
        target: Target,
        fuses: Callable[[Sequence[str]], Collection[str]] | None = None,
        tuner: Tuner | None = None,
        share: float = DEFAULT_SHARE,
    ) -> tuple[Planner, ForwardPlan]:
        """Build the planner of a program, and the plan of its forward half.

        Args:
            signature: names of the tensors of the exported graph.
            source: the program that the graph was translated from.
            requires_grad: the graph inputs that require gradients.
            target: the target of the exported graph.
            fuses: as for the class.
            tuner: as for the class.
            share: as for the class.

        Raises:
            UnsupportedOperatorError: the engine does not support an operator of the program.
        """
        source = fold_constants(source)
        required = source.wants_gradients(requires_grad)
        source = map_calls(source, required, target)
        joint, reach = trace_joint(source, required)
        joint = inline(joint, every=target.inlines_functions)
        if target.in_kernels >= CONVOLUTIONS:
            set_channels_last(joint.graph_module.graph)
        elif tuner is not None and fuses is None:
            # A region covers the operators between convolutions, in the default order of dimensions.
            tuner.choose_layout(joint.graph_module.graph)
        position = {name: i for i, name in enumerate(signature.feeds)}
        feeds = [position[feed] if isinstance(feed, str) else -1 for feed in source.feeds]
        planner = cls(joint, feeds, target, source.conditions, fuses, tuner, share)
        fetched = (*joint.outputs, *_written(signature, source, joint, requires_grad))
        plan = planner._forward(source, fetched, reach)
        return planner, replace(plan, conditions=planner._narrow(signature, source))

    def _forward(self, source: TracedProgram, fetched: Sequence[torch.fx.Node], reach: Reach) -> ForwardPlan:
        joint, kept = self.joint, self._split.kept
        half = self._split.forward()
        made = {node: i for i, node in enumerate(half.outputs)}
        given = {node: i for i, node in enumerate(half.inputs)}
        inputs = [joint.inputs[node] for node in half.inputs]
        feeds = [(self.feeds[i], source.feeds[i]) for i in inputs]
        lowered = self._lower(half, is_forward=True)
        # By the values that backward reads, as eager PyTorch saves those that are recomputed here.
        memory = ReadMemory(joint, self._split.read)
        names = {site.key: name for name, site in lowered.calls.items() if any(site.needs_input_grad)}
        return ForwardPlan(
            lowered=lowered,
            sources=tuple(i if isinstance(feed, str) else feed for i, feed in feeds),
            fetched=tuple(made[node] for node in fetched),
            kept=tuple(made[node] if node in made else ~given[node] for node in kept),
            donated=tuple(i for i, n in enumerate(kept) if n in made and n not in fetched and is_large(n)),
            tangents=tuple(joint.tangents.values()),
            reach=reach.rename(self.feeds, names, arguments_of(lowered.calls)),
            needed=self._feeds(memory.inputs),
            written=self._feeds(joint.written),
            read_outputs=tuple(i for i in range(len(joint.outputs)) if memory.has_output(i)),
        )

    def _lower(self, half: Half, *, is_forward: bool) -> Lowered:
        """Translate a half to ONNX.

        Raises:
            UnsupportedOperatorError: the half is valid only for some of the sizes that the graph accepts, or
                an operator cannot be part of a graph.
        """
        rewriting = Rewriting(half.graph_module.graph)
        compute_channels_last(rewriting, half.graph_module.graph)
        if self._fuses is not None:
            self._made.extend(fuse(half.graph_module.graph, self._fuses))
        if self._tuner is not None:
            self._tuner.tune(rewriting)
        self._made.extend(rewriting.sites)
        lowered = lower_half(half, half_of(self._target, rewriting.in_onnx))
        graph = self.joint.graph_module.graph
        refuse_assumed_of_half(graph, is_forward=is_forward, checked=self.joint.checked)
        if not is_forward and conditions(graph).on_inputs > self._known.on_inputs:
            self._refuse_sizes()
        return lowered

    def _refuse_sizes(self) -> NoReturn:
        raise UnsupportedOperatorError(
            f"the derivative of the model holds for some only of the sizes that it was exported for: "
            f"it needs {line_of_last_condition(self.joint.graph_module.graph)}. Export with these sizes fixed"
        )

    def _narrow(self, signature: GraphSignature, source: TracedProgram) -> dict[str, str]:
        """Return the conditions on sizes that the derivative adds to the exported graph's, with their lines.

        Raises:
            UnsupportedOperatorError: a condition fixes a size, or does not depend on the inputs' sizes alone.
        """
        graph = self.joint.graph_module.graph
        placeholders = source.graph_module.graph.find_nodes(op="placeholder")
        values = {feed: n.meta["val"] for n, feed in zip(placeholders, source.feeds, strict=True)}
        found = added_conditions(graph, self._known, [values[name] for name in signature.inputs])
        if any(_FIXES in condition for condition in found):
            self._refuse_sizes()
        self._known = conditions(graph)
        lines = lines_of_conditions(graph)
        return {condition: lines.get(condition, "") for condition in found}

    def _feeds(self, inputs: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted({self.feeds[i] for i in inputs if self.feeds[i] >= 0}))

    def backward(self, missing: Collection[int]) -> BackwardPlan:
        """Build the plan of the backward half.

        Args:
            missing: positions of the outputs that have no gradient.

        Raises:
            UnsupportedOperatorError: an operator cannot be part of a graph.
        """
        half, nodes = self._split.backward(missing)
        where = {node: i for i, node in enumerate(half.outputs)}
        return BackwardPlan(
            lowered=self._lower(half, is_forward=False) if half.outputs else None,
            given=tuple(i for i in self.joint.tangents.values() if i not in missing),
            gradients={self.feeds[i]: where[node] for i, node in nodes.items() if self.feeds[i] >= 0},
        )


def _written(
    signature: GraphSignature, source: TracedProgram, joint: Joint, requires_grad: frozenset[str]
) -> list[torch.fx.Node]:
    """Return the new value of each tensor that forward writes to, in the order of the graph's mutations.

    Raises:
        UnsupportedOperatorError: forward writes to a tensor that is no mutation of the graph, or to one that
            requires a gradient.
    """
    written = {_name(source.feeds[i]): node for i, node in joint.written.items()}
    names = {origin: name for name, origin in signature.weights.items()}
    found = {}
    for mutation in signature.mutations:
        is_buffer = mutation.kind == "buffer"
        # A buffer that is overwritten before it is read is none of the graph's weights.
        name = names.get(mutation.target, _OWNED + mutation.target) if is_buffer else mutation.target
        if name not in written:
            refuse_write(mutation.target)
        found[name] = written[name]
    for feed in (source.feeds[i] for i in joint.written):
        if _name(feed) not in found:
            refuse_write(feed)
    return list(found.values())


def _name(feed: str | Constant) -> str:
    """Return the name of a feed; for a constant, a name that no feed has."""
    return feed if isinstance(feed, str) else _OWNED + feed.owner
