"""The step of autograd that stands for a whole model on ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from torch2ort._torch import autograd as private
from torch2ort.errors import EngineError
from torch2ort.kernels.zero_tensors import all_with_memory
from torch2ort.pythonop.autocast import Autocast, off
from torch2ort.pythonop.site import UNSAVABLE
from torch2ort.training import batched_grads
from torch2ort.training.engine import Engine
from torch2ort.training.saved_tensor_checks import Saved
from torch2ort.training.verification import Verification


class _Step(NamedTuple):
    """What forward leaves for backward.

    Attributes:
        engine: that ran forward.
        state: what it left.
        saved: what it was given.
        given: what the caller gave, some of which was copied.
        copied: positions of these.
        around: what Functions run inside of.
        verification: compares with eager PyTorch.
    """

    engine: Engine
    state: Any
    saved: Saved
    given: Saved
    copied: Collection[int]
    around: Callable[[], AbstractContextManager[None]]
    verification: Verification | None


class Boundary(torch.autograd.Function):
    """A training engine under :func:`run`: its forward half here, its backward half when autograd asks."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        verification: Verification | None,
        around: Callable[[], AbstractContextManager[None]],
        *feeds: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """One tensor per entry of the graph's fetches; the engine runs inside of what ``around`` gives."""
        given, copied = feeds, _to_copy(engine, feeds)
        feeds = tuple(f.clone() if i in copied else f for i, f in enumerate(feeds)) if copied else feeds
        with around(), off():
            outputs, state = engine.forward(feeds)
        saved = Saved(feeds, {i: outputs[i].detach() for i in engine.read_outputs})
        # Where copies were made, the tensors that were given are what may move.
        ctx.step = _Step(
            engine, state, saved, Saved(given, {}) if copied else saved, copied, around, verification
        )
        ctx.set_materialize_grads(False)
        if len(engine.differentiable) < len(outputs):
            ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in engine.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One gradient per feed.

        Raises:
            EngineError: a double backward was asked for, or one under autocast, or forward cannot run again,
                or what backward reads was moved.
            RuntimeError: a second backward without ``retain_graph``, or a tensor was written to since.
        """
        if torch.is_grad_enabled():
            raise EngineError(
                "ORTModule: a backward with create_graph=True (double backward) was asked for; ONNX Runtime "
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
        engine.moving.look(step.given, engine.needed, step.copied)
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
    step: _Step, keep: bool, gradients: Sequence[torch.Tensor | None], *, last: bool = True
) -> list[torch.Tensor | None]:
    """One gradient per feed; ``last``: of those that this backward is asked for."""
    given = all_with_memory(gradients)
    verification = step.verification if last else None
    if verification is not None:
        verification.run_backward(given, step.engine.weights)
    with step.around():
        found = step.engine.backward(step.state, given, keep=keep or not last)
    if verification is not None:
        verification.check_gradients(found)
    return found


# As `Boundary.apply`, without what a call inside of a torch.func transform needs: ORTModule refuses those.
_apply = private.apply_of(Boundary)


def run(
    engine: Engine,
    verification: Verification | None,
    around: Callable[[], AbstractContextManager[None]],
    feeds: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """What the forward half gives, as autograd sees it.

    Args:
        engine: runs both halves.
        verification: compares with eager PyTorch.
        around: gives what Functions run inside of.
        feeds: one tensor per feed of the graph.

    Returns:
        One tensor per fetch.
    """
    return list(_apply(engine, verification, around, *feeds))


def _to_copy(engine: Engine, feeds: tuple[torch.Tensor, ...]) -> Collection[int]:
    """Positions of the feeds whose changes before backward are expected, or could not be seen.

    Raises:
        RuntimeError: backward reads a tensor of inference mode, which eager PyTorch refuses, too.
    """
    moving = engine.moving.to_copy(engine.needed)
    if not moving and True not in map(torch.Tensor.is_inference, feeds):
        return engine.copied
    unseen = [i for i, feed in enumerate(feeds) if feed.is_inference()]
    if not set(unseen).isdisjoint(engine.needed):
        raise RuntimeError(UNSAVABLE)
    return {*engine.copied, *unseen, *moving}
