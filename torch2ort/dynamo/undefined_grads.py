"""Undefined gradients: those of outputs that no loss reads.

AOTAutograd gets zeros for them. Eager PyTorch computes nothing from an undefined gradient: zeros times an
infinite derivative are NaN, and a gradient of zeros differs from none. So these gradients are recorded before
backward runs, and the nodes that depend on them alone are removed from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch2ort._torch import dynamo as private


class _Noted(threading.local):
    """The outputs without a gradient, of the step whose backward runs in this thread."""

    outputs: frozenset[int] = frozenset()


_noted = _Noted()


def with_undefined_gradients_recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, a compiled graph of several outputs, as a function that records undefined gradients."""

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
    """Return and reset the positions of the outputs without a gradient, of the step whose backward runs."""
    outputs, _noted.outputs = _noted.outputs, frozenset()
    return outputs
