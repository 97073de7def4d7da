"""The autograd function that represents a whole model on ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

from torch2ort._torch import autograd as private
from torch2ort.errors import EngineError
from torch2ort.kernels.zero_tensors import all_with_memory
from torch2ort.pythonop.autocast import Autocast, off
from torch2ort.pythonop.site import UNSAVABLE
from torch2ort.training import batched_grads
from torch2ort.training.engine import Engine
from torch2ort.training.packed_engine import ComparedStep, PackedStep
from torch2ort.training.saved_tensor_checks import Saved
from torch2ort.training.verification import Verification

# An engine, or one step of a packed graph.
StepEngine: TypeAlias = Engine | PackedStep | ComparedStep


class _SavedStep(NamedTuple):
    """State of one forward for its backward.

    Attributes:
        engine: the engine that ran forward.
        state: the engine's state.
        saved: the tensors that the engine was fed with.
        given: the tensors that the caller passed, some of which were copied for the engine.
        copied: positions of the copied tensors.
        around: returns the context manager in which Functions run.
        verification: the comparison with eager PyTorch, if there is one.
    """

    engine: StepEngine
    state: Any
    saved: Saved
    given: Saved
    copied: Collection[int]
    around: Callable[[], AbstractContextManager[None]]
    verification: Verification | None


class Boundary(torch.autograd.Function):
    """A training engine under :func:`run`: forward runs here, backward when autograd calls it."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: StepEngine,
        verification: Verification | None,
        around: Callable[[], AbstractContextManager[None]],
        *feeds: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return one tensor per entry of the graph's fetches; the engine runs inside of ``around()``."""
        given, copied = feeds, _to_copy(engine, feeds)
        feeds = tuple(f.clone() if i in copied else f for i, f in enumerate(feeds)) if copied else feeds
        with around(), off():
            outputs, state = engine.forward(feeds)
        saved = Saved(feeds, {i: outputs[i].detach() for i in engine.read_outputs})
        # If copies were made, it is the caller's tensors that may move.
        ctx.step = _SavedStep(
            engine, state, saved, Saved(given, {}) if copied else saved, copied, around, verification
        )
        ctx.set_materialize_grads(False)
        if len(engine.differentiable) < len(outputs):
            ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in engine.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return one gradient per feed.

        Raises:
            EngineError: a double backward was requested, or autocast is on, or forward cannot run again, or a
                tensor that backward reads was moved.
            RuntimeError: a second backward without ``retain_graph``, or a tensor was written to since
                forward.
        """
        if torch.is_grad_enabled():
            raise EngineError(
                "ORTModule: a backward with create_graph=True (double backward) was requested; ONNX Runtime "
                "computes first derivatives only. Run this model in eager PyTorch for higher derivatives"
            )
        if Autocast.is_on_now():
            raise EngineError(
                "ORTModule: backward was called under torch.autocast, where eager PyTorch casts what the "
                "derivatives compute, too. Call it behind the `with torch.autocast(...):` block, as PyTorch "
                "asks for: gradients are in the types that forward ran in"
            )
        step = ctx.step
        if step is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after "
                "they have already been freed). Specify retain_graph=True if you need to backward through "
                "the graph a second time"
            )
        engine, saved = step.engine, step.saved
        saved.check_feeds(engine.needed)
        engine.moved_feeds.check_moved(step.given, engine.needed, step.copied)
        if engine.read_outputs:
            saved.check_outputs()
        keep = private.backward_keeps_graph()
        if not keep:
            ctx.step = None
        if batched_grads.is_batched(gradients):
            result = batched_grads.in_turn(gradients, functools.partial(_backward, step, keep))
        else:
            result = _backward(step, keep, gradients)
        return (None, None, None, *result)


def _backward(
    step: _SavedStep, keep: bool, gradients: Sequence[torch.Tensor | None], *, last: bool = True
) -> list[torch.Tensor | None]:
    """Return one gradient per feed; ``last`` is False for all but the last backward of a batch."""
    given = all_with_memory(gradients)
    verification = step.verification if last else None
    if verification is not None:
        verification.run_backward(given, step.engine.weights)
    with step.around():
        found = step.engine.backward(step.state, given, keep=keep or not last)
    if verification is not None:
        verification.check_gradients(found)
    return found


# As `Boundary.apply`, without its support of torch.func transforms, which ORTModule refuses.
_apply = private.apply_of(Boundary)


def run(
    engine: StepEngine,
    verification: Verification | None,
    around: Callable[[], AbstractContextManager[None]],
    feeds: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Run the forward half under autograd.

    Args:
        engine: the engine of both halves.
        verification: the comparison with eager PyTorch, if there is one.
        around: returns the context manager in which Functions run.
        feeds: one tensor per feed of the graph.

    Returns:
        One tensor per fetch.
    """
    return list(_apply(engine, verification, around, *feeds))


def _to_copy(engine: StepEngine, feeds: tuple[torch.Tensor, ...]) -> Collection[int]:
    """Return the positions of the feeds that may change before backward, or whose changes cannot be detected.

    Raises:
        RuntimeError: backward reads a tensor of inference mode, which eager PyTorch refuses as well.
    """
    moving = engine.moved_feeds.to_copy(engine.needed)
    if not moving and True not in map(torch.Tensor.is_inference, feeds):
        return engine.copied
    unseen = [i for i, feed in enumerate(feeds) if feed.is_inference()]
    if not set(unseen).isdisjoint(engine.needed):
        raise RuntimeError(UNSAVABLE)
    return {*engine.copied, *unseen, *moving}
