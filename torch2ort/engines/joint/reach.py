"""Which inputs get a gradient from which outputs, by autograd's own graph of the program.

Autograd gives ``None``, not zeros, to a tensor that no differentiable path joins to the loss. A backward
graph always computes numbers, so the difference is found here, by the outputs that have a gradient and the
arguments for which Functions returned ``None``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort.pythonop import site_by_key

# More sets of missing gradients than these are not remembered at once; most models give one.
_MOST_SETS = 256
Edge = tuple[str, int]  # a site's key and the position of an argument of its Function


@dataclass(eq=False)
class _Step:
    """One step of autograd's graph.

    Attributes:
        site: the key of the site that it is the derivative of; empty for an operator.
        feed: the position of the input that it accumulates into; -1 for none.
        inputs: the steps before, ``None`` where no gradient goes.
    """

    site: str = ""
    feed: int = -1
    inputs: list[_Step | None] = field(default_factory=list)


class Reach:
    """Differentiable paths of a program.

    Args:
        outputs: of a run of it under autograd.
        inputs: what it was given.

    Attributes:
        tracked: of each output, whether it requires a gradient.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._feeds = {id(t): i for i, t in enumerate(inputs)}
        self._steps: dict[Any, _Step] = {}
        self.tracked = tuple(t.requires_grad for t in outputs)
        self._outputs = [self._first(t) for t in outputs]
        self._known: dict[Any, frozenset[int]] = {}
        # Identities of what is gone soon.
        self._steps = {}
        self._feeds = {}

    def _first(self, output: torch.Tensor) -> _Step | None:
        if not output.requires_grad:
            return None
        if output.grad_fn is None:
            return _Step(feed=self._feeds.get(id(output), -1))
        return self._step(output.grad_fn)

    def _step(self, function: Any) -> _Step:
        """The step of a node of autograd's, and all before it."""
        first = self._made(function)
        waiting = [function]
        while waiting:
            node = waiting.pop()
            step = self._steps[node]
            if step.inputs or not node.next_functions:
                continue
            for before, _ in node.next_functions:
                if before is None:
                    step.inputs.append(None)
                    continue
                if before not in self._steps:
                    waiting.append(before)
                step.inputs.append(self._made(before))
        return first

    def _made(self, function: Any) -> _Step:
        if function not in self._steps:
            leaf = getattr(function, "variable", None)
            feed = -1 if leaf is None else self._feeds.get(id(leaf), -1)
            self._steps[function] = _Step(getattr(function, "torch2ort_site", ""), feed)
        return self._steps[function]

    def inputs(
        self, outputs: Iterable[int], undefined: Collection[Edge] = (), unmaterialized: Collection[str] = ()
    ) -> frozenset[int]:
        """Positions of the inputs that a gradient of ``outputs`` reaches.

        Args:
            outputs: positions of those that have a gradient.
            undefined: arguments for which a Function's backward returned ``None`` in this run.
            unmaterialized: sites whose Function takes a missing gradient as ``None``; what it then returns
                counts as missing, too. The others take zeros, as they do in eager PyTorch.
        """
        key = tuple(outputs), frozenset(undefined), frozenset(unmaterialized)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_SETS:
                self._known.clear()
            known = self._known[key] = self._walked(*key)
        return known

    def _walked(
        self, outputs: tuple[int, ...], undefined: frozenset[Edge], unmaterialized: frozenset[str]
    ) -> frozenset[int]:
        seen: set[tuple[_Step, bool]] = set()
        stack = [(step, True) for i in outputs if (step := self._outputs[i]) is not None]
        while stack:
            step, defined = stack.pop()
            if (step, defined) in seen:
                continue
            seen.add((step, defined))
            missing: set[int] = set()
            passed = defined
            if step.site:
                positions = site_by_key(step.site).tensor_positions
                missing = {positions.index(p) for key, p in undefined if key == step.site}
                passed = defined or step.site not in unmaterialized
            for i, before in enumerate(step.inputs):
                if before is not None:
                    stack.append((before, passed and i not in missing))
        return frozenset(step.feed for step, defined in seen if defined and step.feed >= 0)
