"""Refusal of attributes and in-place calls by which forward reads or sets a tensor's autograd state."""

from __future__ import annotations

import sys
import traceback
import types
from typing import Any

import torch

from torch2ort._torch import autograd as private
from torch2ort.effects.forbidden_calls import is_forwards
from torch2ort.errors import ExportError
from torch2ort.support.source_lines import line_in

_DETACHES = (torch.Tensor.detach_, torch.detach_)
_SETS_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES: tuple[Any, ...] = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_GRADIENT: tuple[Any, ...] = tuple(
    getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")
)

# For an argument, these may differ between two calls that use the same graph.
_TENSOR: Any = torch.Tensor
_OF_HISTORY: dict[Any, str] = {_TENSOR.is_leaf.__get__: "is_leaf", _TENSOR.grad_fn.__get__: "grad_fn"}


def refuse_state(
    model: torch.nn.Module, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Refuse calls that a graph would leave out.

    Args:
        model: the model, for messages.
        function: the function that is called.
        arguments: its arguments.
        keywords: its keyword arguments.

    Raises:
        ExportError: ``function`` is such a call, and matters for the tensor.
    """
    tensor = arguments[0] if arguments else keywords.get("input")
    if not isinstance(tensor, torch.Tensor):
        return
    if function in _DETACHES and tensor.requires_grad:
        what = "detaches a tensor in place (detach_), which a graph cannot do. Write h = h.detach() instead"
    elif function == _SETS_DATA:
        what = (
            "sets the .data of a tensor, which a graph cannot do. Write a buffer's values with copy_(), or "
        )
        what += "set it before the call"
    elif function in _GRADIENT and tensor.is_leaf and tensor.requires_grad and not _is_converted():
        what = "uses the .grad of a tensor, which a graph cannot do. Do that before or after the call"
    elif function in _REQUIRES and tensor.requires_grad and False in (*arguments[1:], *keywords.values()):
        place = _place(model, tensor)
        what = f"switches the requires_grad of {place}, which a graph cannot do. Switch it before the call"
    elif function == torch.Tensor.retain_grad and tensor.requires_grad and not tensor.is_leaf:
        what = (
            "keeps the gradient of a tensor (retain_grad), which a graph cannot do. Call the original model "
            "to look at gradients inside of it"
        )
    elif (asked := _asked(model, function, tensor)) is not None:
        what = (
            f"asks for the {asked} of a tensor, which a graph answers by the call that it was made from. "
            f"Pass what depends on it as an argument of its own, such as a bool"
        )
    else:
        return
    if is_forwards():
        line = line_in(traceback.extract_stack()) or "forward"
        raise ExportError(f"{type(model).__name__}: {line} {what}")


def _asked(model: torch.nn.Module, function: Any, tensor: torch.Tensor) -> str | None:
    """Return the name of the state that forward reads of a tensor; ``None`` if it is equal in each call."""
    asked = private.OF_MEMORY.get(function)
    if asked is None and function in _OF_HISTORY and tensor.is_leaf and tensor.requires_grad:
        # Only arguments are left: without a gradient they are leaves in each call, and so is a parameter.
        own = any(tensor is parameter for parameter in model.parameters())
        asked = None if own else _OF_HISTORY[function]
    return None if asked is None or _is_asked_by_torch() else asked


def _is_asked_by_torch() -> bool:
    """Return True if a library reads the state, and not forward itself; the library handles both answers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__") == __name__ or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    asking = "" if frame is None else str(frame.f_globals.get("__name__"))
    return asking.partition(".")[0] in ("torch", "torch2ort")


def _is_converted() -> bool:
    """Return True if ``Module.to`` reads the gradient, to convert it together with its parameter."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_apply" and frame.f_globals.get("__name__") == "torch.nn.modules.module":
            return True
        frame = frame.f_back
    return False


def _place(model: torch.nn.Module, tensor: torch.Tensor) -> str:
    names = (name for name, parameter in model.named_parameters() if parameter is tensor)
    name = next(names, None)
    return "a tensor" if name is None else f"{type(model).__name__}.{name}"
