"""Gradients of outputs that no loss reads.

AOTAutograd is given zeros for them. Eager PyTorch computes nothing from what is not there: zeros times an
infinite derivative are no numbers, and a gradient of zeros is not no gradient. So they are noted before
backward runs, and what depends on them alone is left out of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch2ort._torch import dynamo as private


class _Noted(threading.local):
    """What is missing of the step that runs backward in this thread."""

    outputs: frozenset[int] = frozenset()


_noted = _Noted()


def watched(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, a graph of several outputs that AOTAutograd compiled, whose missing gradients are noted."""

    def watching(*args: Any) -> Any:
        before = private.steps_so_far()
        outputs = run(*args)
        step = private.step_since(before, outputs)
        if step is not None:
            step.register_prehook(_note)
        return outputs

    return private.uncompiled(watching)


def _note(gradients: tuple[Any, ...]) -> None:
    _noted.outputs = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)


def take_missing() -> frozenset[int]:
    """Numbers of the outputs without a gradient, of the step whose backward runs now; only once."""
    outputs, _noted.outputs = _noted.outputs, frozenset()
    return outputs
