"""The step of autograd that stands for a whole model on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch2ort.engines import _torch_private as private
from torch2ort.engines.interface import Engine, ForwardState
from torch2ort.engines.verification import Verification
from torch2ort.errors import EngineError


class Boundary(torch.autograd.Function):
    """Runs a training engine: its forward half here, its backward half when autograd asks."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        verification: Verification | None,
        around: Callable[[], AbstractContextManager[None]],
        *feeds: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """One tensor per entry of the graph's fetches; the engine runs inside of what ``around`` gives."""
        feeds = _lasting(engine, feeds)
        ctx.random_state = torch.get_rng_state() if engine.uses_rng else None
        with around():
            outputs, state = engine.forward(feeds)
        ctx.around = around
        ctx.engine, ctx.state, ctx.feeds, ctx.retained = engine, state, feeds, False
        ctx.versions = [private.version_of(feed) for feed in feeds]
        # Aliases: the outputs themselves will hold this step, and would keep it alive in a circle.
        ctx.outputs = [outputs[i].detach() for i in engine.read_outputs]
        ctx.verification = verification
        ctx.set_materialize_grads(False)
        if len(engine.differentiable) < len(outputs):
            ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in engine.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One gradient per feed.

        Raises:
            EngineError: a double backward was asked for, or forward cannot run again.
            RuntimeError: a second backward without ``retain_graph``, or a tensor was written to since.
        """
        if torch.is_grad_enabled():
            raise EngineError(
                "ORTModule: a backward with create_graph=True (double backward) was asked for; ONNX Runtime "
                "computes first derivatives only. Run this model in eager PyTorch for higher derivatives"
            )
        state: ForwardState | None = ctx.state
        if state is None:
            with ctx.around():
                state = _state_again(ctx)
        else:
            _check_versions(ctx, ctx.engine.needed)
            _check_outputs(ctx)
        ctx.retained = private.backward_keeps_graph()
        keep = ctx.retained and ctx.engine.states_last
        if not keep:
            ctx.state, ctx.outputs = None, ()
        with ctx.around():
            result = ctx.engine.backward(state, gradients, keep=keep)
            if result is None:
                result = ctx.engine.backward(_run_again(ctx), gradients, keep=keep)
        if ctx.verification is not None:
            ctx.verification.check_gradients(gradients, ctx.engine.weights, result)
        if not ctx.retained:
            ctx.feeds = ctx.verification = None
        return (None, None, None, *result)


def _state_again(ctx: Any) -> ForwardState:
    """The state of a forward whose backward has already run.

    ONNX Runtime's backward consumes the state, so that a retained graph is one that can be run again,
    with the same random numbers.
    """
    if not ctx.retained:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they "
            "have already been freed). Specify retain_graph=True if you need to backward through the graph a "
            "second time"
        )
    return _run_again(ctx)


def _run_again(ctx: Any) -> ForwardState:
    """The state of a second run of forward.

    Raises:
        EngineError: it would write to what the first run wrote to, and may read what that left there.
    """
    if ctx.engine.remembering:
        raise EngineError(
            f"ORTModule: this backward must run forward again, for the state of the first run is used up, "
            f"and {ctx.engine.remembering}.forward writes to Python objects or tensors that it finds there, "
            f"which a second run would do again. Call the module again before each backward"
        )
    _check_versions(ctx, ctx.engine.read)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if ctx.random_state is not None:
            torch.set_rng_state(ctx.random_state)
        state: ForwardState = ctx.engine.forward(ctx.feeds)[1]
    return state


def _lasting(engine: Engine, feeds: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """``feeds`` with copies of those whose changes before backward are expected, or could not be seen.

    Raises:
        RuntimeError: backward reads a tensor of inference mode, which eager PyTorch refuses, too.
    """
    unseen = [i for i, feed in enumerate(feeds) if feed.is_inference()]
    if not set(unseen).isdisjoint(engine.needed):
        raise RuntimeError(
            "Inference tensors cannot be saved for backward. Please do not use Tensors created in inference "
            "mode in computation tracked by autograd. To work around this, you can make a clone to get a "
            "normal tensor and use it in autograd, or use `torch.no_grad()` instead of "
            "`torch.inference_mode()`."
        )
    copied = {*engine.copied, *unseen}
    return tuple(f.clone() if i in copied else f for i, f in enumerate(feeds)) if copied else feeds


def _check_outputs(ctx: Any) -> None:
    """Refuse what eager PyTorch refuses: an output that backward reads was written to since the forward."""
    for position, output in zip(ctx.engine.read_outputs, ctx.outputs, strict=True):
        version = private.version_of(output)
        if version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {_kind(output)}, which is output {position} of the model, is at version "
                f"{version}; expected version 0 instead. Write to a clone of it, or after backward"
            )


def _kind(tensor: torch.Tensor) -> str:
    return f"a tensor of {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"


def _check_versions(ctx: Any, positions: tuple[int, ...]) -> None:
    """Refuse what eager PyTorch refuses: a tensor that backward needs was written to since the forward."""
    for position in positions:
        feed, expected = ctx.feeds[position], ctx.versions[position]
        version = private.version_of(feed)
        if version != expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {_kind(feed)} is at version {version}; expected version {expected} instead. "
                f"Clone it before the model's forward, or change it after backward"
            )
