"""What ``forward`` asks of its arguments beside their values, and a graph answers differently.

Each value of a graph is contiguous, is no view and has no history: a ``forward`` that tells a transposed
argument from others, or a leaf from what was computed, would be told otherwise than in eager PyTorch. Many
ask and compute the same either way, as by ``if not x.is_contiguous(): x = x.contiguous()``, so what they give
is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch2ort.errors import ExportError
from torch2ort.pythonop import _torch_private as private
from torch2ort.pythonop.site import Site

_Values = list[torch.Tensor]
_T: Any = torch.Tensor
_OF_LAYOUT = frozenset(
    {
        _T.__array__, _T.__dlpack__, _T.as_strided, _T.data_ptr, _T.is_contiguous, _T.numpy, _T.storage,
        _T.storage_offset, _T.stride, _T.untyped_storage, torch.as_strided,
    }
)  # fmt: skip
_OF_HISTORY = {
    _T.is_leaf.__get__: "is_leaf",
    _T.grad_fn.__get__: "grad_fn",
    private.base_of: "_base",
    private.is_view: "_is_view()",
}


class Questions(TorchFunctionMode):
    """Notices them.

    Args:
        site: the call.
        tensors: its tensor arguments.

    Attributes:
        layout: whether the layout of any tensor was asked for.
        history: position of an argument that was asked for its history, and the attribute.
    """

    def __init__(self, site: Site, tensors: _Values) -> None:
        super().__init__()
        self._positions = {id(t): p for p, t in zip(site.tensor_positions, tensors, strict=True)}
        self.layout = False
        self.history: tuple[int, str] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        self.layout = self.layout or func in _OF_LAYOUT
        if func in _OF_HISTORY and id(args[0]) in self._positions:
            self.history = self._positions[id(args[0])], _OF_HISTORY[func]
        return func(*args, **(kwargs or {}))


def refuse_history(site: Site, asked: Questions) -> None:
    """Refuse a ``forward`` that asked for an answer which no run of a graph has.

    Raises:
        ExportError: it did.
    """
    if asked.history is None:
        return
    position, name = asked.history
    if position in site.originals:
        return
    if name in ("is_leaf", "grad_fn") and not site.needs_input_grad[position]:
        return
    raise ExportError(
        f"{site.func_name}: forward asks for {name} of argument {position}, which in a graph has no history: "
        f"each run would answer as for a leaf that is no view. Ask in front of apply, and pass the answer as "
        f"an argument"
    )


def refuse_layout(site: Site, arguments: _Values, results: Callable[[_Values], _Values]) -> None:
    """Refuse a ``forward`` that computes other values for contiguous tensors than for those of the model.

    Args:
        site: the call.
        arguments: real tensors that lie in memory as those of the model do.
        results: what forward gives for some tensors.

    Raises:
        ExportError: it does.
    """
    try:
        one, other = results(arguments), results([t.contiguous() for t in arguments])
    except Exception:
        # Of made-up numbers it need not make sense.
        return
    if len(one) != len(other) or not all(map(_alike, one, other)):
        raise ExportError(
            f"{site.func_name}: forward asks how its arguments lie in memory and computes other values for "
            f"contiguous ones, which all are in a graph. Call .contiguous() on them in front of apply, or "
            f"let forward compute the same for both"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    loose = 1e-2 if one.element_size() < 4 else 1e-4
    return torch.allclose(one, other, rtol=loose, atol=loose, equal_nan=True)
