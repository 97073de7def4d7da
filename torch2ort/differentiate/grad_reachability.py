"""Inputs that get a gradient from given outputs, by autograd's own graph of the program.

Autograd returns ``None``, not zeros, for a tensor that no differentiable path connects to the loss. A
backward graph always computes numbers, so the difference is found here, from the outputs that have a gradient
and the arguments for which Functions returned ``None``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# At most so many sets of missing gradients are cached; most models have one.
_MOST_SETS = 256
_NONE = -1, 0
_Seen = tuple[int, int, bool]  # a step's position, one of its results, and whether a gradient arrives for it
Edge = tuple[str, int]  # the name of a call and the position of an argument of its Function


class AutogradNode(NamedTuple):
    """One node of autograd's graph.

    Attributes:
        call: name of the call of a Function whose derivative it is; empty for an operator.
        feed: the position of the input that it accumulates into; -1 for none.
        inputs: position and result index of each preceding step; -1 where no gradient flows.
    """

    call: str
    feed: int
    inputs: tuple[tuple[int, int], ...]


class Reach:
    """Differentiable paths of a program.

    Args:
        steps: autograd's graph.
        outputs: step and result of each output, as in :attr:`AutogradNode.inputs`; -1 for an output that
            requires no gradient.
        arguments: call of a Function -> the positions of its tensor arguments.
    """

    def __init__(
        self,
        steps: Sequence[AutogradNode],
        outputs: Sequence[tuple[int, int]],
        arguments: Mapping[str, Sequence[int]],
    ) -> None:
        self._steps, self._outputs, self._arguments = tuple(steps), tuple(outputs), arguments
        self._calls = {step.call: position for position, step in enumerate(steps) if step.call}
        self._known: dict[Any, tuple[frozenset[_Seen], frozenset[int]]] = {}

    def description(self) -> dict[str, Any]:
        """Return the paths as JSON-compatible data."""
        return {"steps": [list(step) for step in self._steps], "outputs": list(self._outputs)}

    @classmethod
    def of(cls, description: Mapping[str, Any], arguments: Mapping[str, Sequence[int]]) -> Reach:
        """Build the paths from the result of :meth:`description`."""
        steps = [AutogradNode(call, feed, _pairs(inputs)) for call, feed, inputs in description["steps"]]
        return cls(steps, _pairs(description["outputs"]), arguments)

    def rename(
        self, feeds: Sequence[int], calls: Mapping[str, str], arguments: Mapping[str, Sequence[int]]
    ) -> Reach:
        """Return the same paths with other positions of the inputs and names of the calls.

        Args:
            feeds: the new position of each input.
            calls: old name -> new name; calls that are missing become operators.
            arguments: as for the class, by the new names.
        """
        steps = [
            AutogradNode(calls.get(step.call, ""), feeds[step.feed] if step.feed >= 0 else -1, step.inputs)
            for step in self._steps
        ]
        return Reach(steps, self._outputs, arguments)

    @property
    def tracked(self) -> tuple[bool, ...]:
        """True for each output that requires a gradient."""
        return tuple(step >= 0 for step, _ in self._outputs)

    def inputs(self, outputs: Iterable[int], undefined: Collection[Edge] = ()) -> frozenset[int]:
        """Return the positions of the inputs that a gradient of ``outputs`` reaches.

        Args:
            outputs: positions of the outputs that have a gradient.
            undefined: arguments for which a Function's backward returned ``None`` in this run.
        """
        return self._known_of(outputs, undefined)[1]

    def defined_output_gradients(
        self, call: str, outputs: Iterable[int], undefined: Collection[Edge] = ()
    ) -> tuple[bool, ...] | None:
        """Return which gradients autograd passes to the backward of a Function.

        Args:
            call: the name of its call.
            outputs: positions of the outputs that have a gradient.
            undefined: arguments for which the Functions whose backward ran before returned ``None``.

        Returns:
            One bool per tensor that forward returned, up to the last one that is read; ``()`` if its backward
            does not run at all, ``None`` if the call is unknown.
        """
        position = self._calls.get(call)
        if position is None:
            return None
        seen, _ = self._known_of(outputs, undefined)
        results = [result for at, result, _ in seen if at == position]
        return tuple((position, i, True) in seen for i in range(max(results, default=-1) + 1))

    def _known_of(
        self, outputs: Iterable[int], undefined: Collection[Edge]
    ) -> tuple[frozenset[_Seen], frozenset[int]]:
        """Return the results that a gradient arrives at, and the positions of the inputs that it reaches."""
        key = tuple(outputs), frozenset(undefined)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_SETS:
                self._known.clear()
            seen = frozenset(self._walk(*key))
            feeds = (self._steps[position].feed for position, _, defined in seen if defined)
            known = self._known[key] = seen, frozenset(feed for feed in feeds if feed >= 0)
        return known

    def _walk(self, outputs: tuple[int, ...], undefined: frozenset[Edge]) -> set[_Seen]:
        """Return the results of steps to which autograd passes a gradient, including ``None``."""
        seen: set[_Seen] = set()
        stack = [(*self._outputs[i], True) for i in outputs if self._outputs[i] != _NONE]
        while stack:
            position, result, defined = stack.pop()
            if (position, result, defined) in seen:
                continue
            seen.add((position, result, defined))
            step = self._steps[position]
            missing: set[int] = set()
            if step.call:
                positions = self._arguments[step.call]
                missing = {positions.index(p) for call, p in undefined if call == step.call}
            # A Function's backward runs even if its gradients are None. The arguments for which it returned
            # None are left out.
            passed = defined or bool(step.call)
            for i, before in enumerate(step.inputs):
                if before != _NONE:
                    stack.append((*before, passed and i not in missing))
        return seen


def _pairs(data: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((step, result) for step, result in data)


def traced_reach(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Reach:
    """Return the paths of a run of a program under autograd, with calls named by the keys of their sites.

    Args:
        outputs: the results of the run.
        inputs: the arguments of the run: leaves, or tensors with a grad_fn of their own, as in a joint trace.
    """
    feeds = {id(t): i for i, t in enumerate(inputs)}
    made = {t.grad_fn: i for i, t in enumerate(inputs) if t.grad_fn is not None}
    found: dict[Any, int] = {}
    steps: list[AutogradNode] = []

    def number(function: Any) -> int:
        """Return the position of a node of autograd; a new one is queued for its inputs."""
        if function not in found:
            found[function] = len(steps)
            leaf = getattr(function, "variable", None)
            feed = made.get(function, -1) if leaf is None else feeds.get(id(leaf), -1)
            steps.append(AutogradNode(getattr(function, "torch2ort_site", ""), feed, ()))
            waiting.append(function)
        return found[function]

    waiting: list[Any] = []
    firsts: list[tuple[int, int]] = []
    for output in outputs:
        if not output.requires_grad:
            firsts.append(_NONE)
        elif output.grad_fn is None:
            firsts.append((len(steps), 0))
            steps.append(AutogradNode("", feeds.get(id(output), -1), ()))
        else:
            firsts.append((number(output.grad_fn), output.output_nr))
        while waiting:
            function = waiting.pop()
            edges = function.next_functions
            before = tuple(_NONE if f is None else (number(f), result) for f, result in edges)
            steps[found[function]] = steps[found[function]]._replace(inputs=before)
    return Reach(steps, firsts, {})
