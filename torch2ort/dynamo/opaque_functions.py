"""autograd.Functions that stay opaque in graphs of dynamo: ``options={"keep_functions": True}``.

dynamo traces into a Function before it calls a backend. So its handling of ``apply`` is replaced by one that
checks, for each call, the option of the graph's backend.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.original_tensors import Originals
from torch2ort.pythonop.abstract_run.sample_tensors import Sample
from torch2ort.pythonop.caught_exceptions import ExceptClause, handlers_around
from torch2ort.pythonop.interception import Capture, is_user_function
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP
from torch2ort.pythonop.site import qualified_name

OPTION = "keep_functions"


class _Tracing(threading.local):
    """The sites of the graph that AOTAutograd traces in this thread."""

    sites: list[Site] | None = None


_tracing = _Tracing()


def keep_functions_of(backend: Callable[..., Any]) -> None:
    """Let dynamo keep the Functions in graphs for ``backend`` opaque, where its options enable this."""

    def stand_in(
        function: Any,
        options: dict[str, Any] | None,
        tensors: Sequence[torch.Tensor],
        inputs: Mapping[int, torch.Tensor],
        places: Sequence[tuple[str, int]],
    ) -> Callable[..., Any] | None:
        if not is_user_function(function):
            return None
        wanted = (options or {}).get(OPTION) is True
        if private.in_transform(tensors):
            raise UnsupportedOperatorError(
                f"{qualified_name(function)}: called inside of a torch.func transform (grad, vmap, "
                f"jvp, ...), where torch.compile differentiates what forward computes, and not by the "
                f"Function's own backward. Keep the transform out of the compiled code, with "
                f"torch.compiler.disable, or the Function out of the transform"
            )
        return _call_of(function, inputs, handlers_around(places)) if wanted else None

    private.stand_in_for_apply(backend, stand_in)


@contextlib.contextmanager
def calls_in(sites: list[Site]) -> Iterator[None]:
    """Context that collects in ``sites`` the calls of Functions that are traced in it."""
    before, _tracing.sites = _tracing.sites, sites
    try:
        yield
    finally:
        _tracing.sites = before


def _call_of(
    function: type[torch.autograd.Function],
    inputs: Mapping[int, torch.Tensor],
    handlers: tuple[ExceptClause, ...],
) -> Callable[..., Any]:
    """Return the callable that replaces ``function.apply`` in a graph of dynamo.

    Args:
        function: the Function.
        inputs: arguments that are inputs of the graph, by position.
        handlers: the ``except`` clauses around the call.
    """
    references = {i: weakref.ref(tensor) for i, tensor in inputs.items()}

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = {i: tensor for i, reference in references.items() if (tensor := reference()) is not None}
        sample = Sample(alive)
        # The values of the other arguments are unknown. Where the call must run on real tensors, it gets
        # sample tensors.
        sample.calls[function], sample.sizes_needed = [], True
        # dynamo's own trace needs the outputs alone, and does not pass on an error by its type.
        originals = Originals.of_call(alive, is_trained=_tracing.sites is not None)
        with Capture(
            training=torch.is_grad_enabled(),
            sample=sample,
            originals=originals,
            handlers=handlers,
            operator=_opaque,
        ) as capture:
            result = function.apply(*args, **kwargs)
        if _tracing.sites is not None:
            _tracing.sites += capture.sites.values()
        return result

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _opaque(tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = DIFFERENTIABLE_PYTHON_OP(tensors, key)
    return found[:-1]
