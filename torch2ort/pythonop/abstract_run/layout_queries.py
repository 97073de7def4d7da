"""Queries of ``forward`` about its arguments, beside their values, for which a graph has other answers.

Each value of a graph is contiguous, is not a view and has no history. A ``forward`` that distinguishes a
transposed argument from others, or a leaf from a computed tensor, would behave differently from eager
PyTorch.
Many compute the same either way, as by ``if not x.is_contiguous(): x = x.contiguous()``, so their results are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ExportError
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
    _T.register_hook: "register_hook()",
    _T.retain_grad: "retain_grad()",
}
_OF_AN_OUTPUT = _OF_HISTORY | {_T.requires_grad.__get__: "requires_grad"}
_OF_A_GRADIENT = ("is_leaf", "grad_fn", "register_hook()", "retain_grad()")


class QueryObserver(TorchFunctionMode):
    """Observer of such queries.

    Args:
        arguments: tensor arguments of the call, by position.
        outputs: its tensor outputs, if they exist already.

    Attributes:
        layout: True if the memory layout of any tensor was read.
        history: position of an argument whose history was read, and the name of the query.
        output: position of an output whose history was read, and the name of the query.
    """

    def __init__(
        self, arguments: Mapping[int, torch.Tensor], outputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        super().__init__()
        self._positions = {id(t): p for p, t in arguments.items()}
        self._outputs = {id(t): i for i, t in enumerate(outputs) if t is not None}
        self.layout = False
        self.history: tuple[int, str] | None = None
        self.output: tuple[int, str] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        self.layout = self.layout or func in _OF_LAYOUT
        if func in _OF_HISTORY and id(args[0]) in self._positions:
            self.history = self._positions[id(args[0])], _OF_HISTORY[func]
        if func in _OF_AN_OUTPUT and id(args[0]) in self._outputs:
            self.output = self._outputs[id(args[0])], _OF_AN_OUTPUT[func]
        return func(*args, **(kwargs or {}))


def refuse_history(site: Site, asked: QueryObserver, method: str = "forward") -> None:
    """Refuse a method of a Function that read the history of a tensor, which no run of a graph has.

    Raises:
        ExportError: the method did.
    """
    if asked.output is not None:
        number, name = asked.output
        raise ExportError(
            f"{site.func_name}: {method} asks for {name} of output {number}, which in a graph has no "
            f"history. Save what backward needs to know of it in an attribute of ctx"
        )
    if asked.history is None:
        return
    position, name = asked.history
    if position in site.originals or (name in _OF_A_GRADIENT and not site.needs_input_grad[position]):
        return
    if name in ("register_hook()", "retain_grad()"):
        raise ExportError(
            f"{site.func_name}: {method} calls {name} of argument {position}, whose gradient exists only "
            f"inside of a graph. Process the gradient in backward instead"
        )
    raise ExportError(
        f"{site.func_name}: {method} asks for {name} of argument {position}, which in a graph has no "
        f"history: each run would answer as for a leaf that is not a view. Read it before apply, and "
        f"pass the answer as an argument"
    )


def refuse_layout(site: Site, arguments: _Values, results: Callable[[_Values], _Values]) -> None:
    """Refuse a ``forward`` that computes other values for contiguous tensors than for those of the model.

    Args:
        site: the call.
        arguments: real tensors with the memory layouts of the model's.
        results: returns the results of forward for some tensors.

    Raises:
        ExportError: forward computes other values.
    """
    try:
        one, other = results(arguments), results([t.contiguous() for t in arguments])
    except Exception:
        # Forward may fail on made-up numbers.
        return
    if len(one) != len(other) or not all(map(is_alike, one, other)):
        raise ExportError(
            f"{site.func_name}: forward reads the memory layout of its arguments and computes other values "
            f"for contiguous ones, and in a graph all are contiguous. Call .contiguous() on them before "
            f"apply, or make forward compute the same for both"
        )


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the results of two runs are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    loose = 1e-2 if one.element_size() < 4 else 1e-4
    return torch.allclose(one, other, rtol=loose, atol=loose, equal_nan=True)
