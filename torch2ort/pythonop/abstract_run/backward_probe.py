"""One observed run of a site's ``backward``, to find behaviour in which a graph differs from eager PyTorch.

A gradient of a graph is contiguous, a saved tensor has no history, and a write to a value that a node keeps
is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ExportError
from torch2ort.log import logger
from torch2ort.pythonop.abstract_run.forward_probe import (
    BackwardInputs,
    EndedRun,
    OperatorObserver,
    refuse_backpropagation,
    run_forward,
)
from torch2ort.pythonop.abstract_run.io_calls import in_front_of_calls_outside
from torch2ort.pythonop.abstract_run.layout_queries import QueryObserver, is_alike, refuse_history
from torch2ort.pythonop.native import backward_of, native
from torch2ort.pythonop.site import TENSOR, Result, Site

_Tensors = Sequence[torch.Tensor]
# A backward with more operators than these is not observed to its end.
_MOST_OPERATORS = 5_000
_WAY_OUT = "Write to a buffer that forward only reads, or return the value from forward"


def refuse_backward(
    site: Site, left: BackwardInputs, result: Result, gradients: _Tensors
) -> tuple[bool, bool]:
    """Run ``backward`` and refuse behaviour that a graph cannot reproduce.

    Args:
        site: the call; its :attr:`Site.written_back` is filled.
        left: the tensors and the context that ``forward`` left.
        result: the result of ``forward``.
        gradients: one per tensor output.

    Returns:
        Two values: True if backward ended, and True if it read the memory layout of tensors.

    Raises:
        ExportError: backward asks a saved tensor for its history, writes to a value of the graph, or
            backpropagates into the graph.
    """
    arguments = {p: t for p, reference in left.arguments.items() if (t := reference()) is not None}
    outputs = [reference() for reference in left.outputs]
    watch, asked, ended = OperatorObserver(most=_MOST_OPERATORS), QueryObserver(arguments, outputs), False
    try:
        with watch, asked:
            _run(site, left.context, result, gradients)
        ended = True
    except (Exception, EndedRun) as error:
        # Logged as text: a log record with the error would hold the frames, and the tensors in them.
        logger.debug("%s: backward was not seen to its end at export (%s)", site.func_name, str(error))
    refuse_history(site, asked, "backward")
    refuse_backpropagation(site, arguments, "backward")
    _refuse_writes(site, result, watch.written, arguments, outputs)
    return ended, asked.layout


def _run(site: Site, context: native.Context, result: Result, gradients: _Tensors) -> Any:
    """Return the result of ``backward``."""
    assert site.function is not None
    given: list[torch.Tensor | None] = [None] * len(result.outputs)
    for i, (position, gradient) in enumerate(zip(_tensors_of(result), gradients, strict=False)):
        if i not in result.non_differentiable or context.materialize_grads:
            given[position] = gradient
    with private.with_autograd(), torch.no_grad(), in_front_of_calls_outside(_give_up):
        return backward_of(site.function)(context, *given)


def _give_up(called: str) -> None:
    raise EndedRun(f"it calls {called}")


def _tensors_of(result: Result) -> list[int]:
    return [i for i, value in enumerate(result.outputs) if value is TENSOR]


def _refuse_writes(
    site: Site,
    result: Result,
    written: set[StorageWeakRef],
    arguments: Mapping[int, torch.Tensor],
    outputs: Sequence[torch.Tensor | None],
) -> None:
    for position, tensor in arguments.items():
        if StorageWeakRef(tensor.untyped_storage()) not in written:
            continue
        if position in site.originals and position not in result.mutated:
            site.written_back = (*site.written_back, position)
            continue
        raise ExportError(
            f"{site.func_name}: backward writes to argument {position}, "
            f"{'to which forward writes, too' if position in result.mutated else 'which the model computed'}"
            f", and a graph loses that. {_WAY_OUT}"
        )
    for i, output in enumerate(outputs):
        if output is not None and StorageWeakRef(output.untyped_storage()) in written:
            raise ExportError(
                f"{site.func_name}: backward writes to output {i}, and a graph loses that. {_WAY_OUT}"
            )


def gradients_of(
    site: Site, tensors: _Tensors, result: Result, laid_out: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradients that ``backward`` computes for real tensors.

    Args:
        site: the call.
        tensors: its arguments.
        result: the result of ``forward``.
        laid_out: returns an output's gradient in another memory layout, with the same numbers.
    """
    context = native.Context(site.needs_input_grad)
    with OperatorObserver(most=_MOST_OPERATORS):
        returned = run_forward(site, context, site.call_arguments(list(tensors)))
        values = returned if isinstance(returned, tuple) else (returned,)
        outputs = [v for v in values if isinstance(v, torch.Tensor)]
        found = _run(site, context, result, [laid_out(like_gradient(t)) for t in outputs])
    return [
        t.detach().clone()
        for t in (found if isinstance(found, tuple) else (found,))
        if isinstance(t, torch.Tensor)
    ]


def like_gradient(output: torch.Tensor) -> torch.Tensor:
    """Return a tensor of possible values for the gradient of ``output``."""
    made = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    if not (output.dtype.is_floating_point or output.dtype.is_complex):
        return made.zero_()
    return made.uniform_(0.5, 1)


def not_in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with the same offset, in another memory order."""
    if tensor.dim() > 1:
        return tensor.T.contiguous().T if tensor.dim() == 2 else _reversed(_reversed(tensor).contiguous())
    return tensor.repeat_interleave(2)[::2] if tensor.dim() else tensor


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def refuse_gradient_layout(
    site: Site,
    arguments: list[torch.Tensor],
    found: Callable[[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Refuse a ``backward`` that computes other values for contiguous gradients than for others.

    Args:
        site: the call.
        arguments: real tensors with the memory layouts of the model's.
        found: returns the gradients of backward, from arguments and a function that lays gradients out.

    Raises:
        ExportError: backward computes other values.
    """
    try:
        one = found(arguments, not_in_rows)
        other = found([t.contiguous() for t in arguments], torch.Tensor.contiguous)
    except (Exception, EndedRun):
        # Backward may fail on made-up numbers.
        return
    if len(one) != len(other) or not all(map(is_alike, one, other)):
        raise ExportError(
            f"{site.func_name}: backward reads the memory layout of tensors and computes other values for "
            f"contiguous ones, and in a graph all are contiguous. Call .contiguous() on the gradients at its "
            f"start, or make it compute the same for both"
        )
