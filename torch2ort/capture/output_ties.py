"""Ties of a call's outputs to other tensors in eager PyTorch, besides their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort.capture.aliased_outputs import Origin, put_back
from torch2ort.capture.orphan_grad_outputs import DeadEnd, put_dead_ends
from torch2ort.capture.output_views import OutputView, put_views


class Ties(NamedTuple):
    """Properties of a call's outputs that no run of a graph creates.

    Attributes:
        origins: for each output that is a tensor from before, that tensor.
        views: for each output that is a view of such a tensor, or of another output, the steps that make it.
        tracked: for each output, True if it requires a gradient.
        dead_ends: the outputs with a gradient that reaches no tensor of the caller's.
    """

    origins: tuple[Origin, ...]
    views: tuple[OutputView | None, ...]
    tracked: tuple[bool, ...]
    dead_ends: tuple[DeadEnd, ...]

    def exist(self) -> bool:
        """Return True if an output is an earlier tensor, is a view, or has a dead end."""
        return any(self.origins) or any(self.views) or bool(self.dead_ends)

    def any_requires_gradient_itself(self) -> bool:
        """Return True if an output requires a gradient and is neither an earlier tensor nor a view of one."""
        # A view of a tensor that requires a gradient requires one whether gradients are on or off.
        viewed = {end.output for end in self.dead_ends if end.leaf}
        outputs = zip(self.tracked, self.origins, self.views, strict=True)
        return any(
            tracked and origin is None and view is None and i not in viewed
            for i, (tracked, origin, view) in enumerate(outputs)
        )

    def tie(
        self,
        outputs: list[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        dims: Sequence[Sequence[int | str]],
    ) -> None:
        """Tie the outputs of a run.

        Args:
            outputs: outputs of the run; changed in place.
            inputs: the call's tensors.
            weights: the model's tensors by name.
            dims: sizes of the inputs, as :class:`torch2ort.graph.accepted_sizes.Sizes` has them.
        """
        put_back(outputs, self.origins, inputs, weights)
        put_views(outputs, self.views, self.tracked, inputs, weights, dims)
        put_dead_ends(outputs, self.dead_ends, inputs, weights)

    def to_json(self) -> dict[str, Any]:
        """Return the ties in a form for JSON."""
        return {
            "origins": [None if o is None else list(o) for o in self.origins],
            "views": [None if v is None else v.to_json() for v in self.views],
            "tracked": list(self.tracked),
            "dead_ends": [list(end) for end in self.dead_ends],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ties:
        """Load the result of :meth:`to_json`."""
        return cls(
            tuple(None if o is None else (o[0], o[1]) for o in data["origins"]),
            tuple(None if v is None else OutputView.from_json(v) for v in data["views"]),
            tuple(data["tracked"]),
            tuple(DeadEnd(output, leaf, tuple(i), tuple(w)) for output, leaf, i, w in data["dead_ends"]),
        )
