"""Operators of libraries, registered with PyTorch's dispatcher, as Functions.

The dispatcher runs such an operator, and the derivative that was registered with it, as in eager PyTorch.
Neither is traced: both may read numbers, draw random ones, and act differently in each run.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function

from torch2ort._torch import dispatch as private
from torch2ort.errors import EngineError
from torch2ort.kernels.functions import (
    AutogradGraph,
    backward_of_graph,
    decode_library_call,
    forward_with_graph,
)

_AS_IT_IS = contextlib.nullcontext()
_Sizes = list["int | list[int] | None"]
# Texts of calls that have run once without drawing random numbers.
_DRAW_NOTHING: set[str] = set()


def with_results(text: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Return the text of a call with the expected types and sizes of its results.

    Args:
        text: the call.
        inputs: its tensors in a trace.
        outputs: its results in a trace.
    """
    known = {str(n): [i, d] for i, t in reversed([*enumerate(inputs)]) for d, n in enumerate(t.shape)}
    found = [
        [
            str(t.dtype).removeprefix("torch."),
            [n if isinstance(n, int) else known.get(str(n)) for n in t.shape],
        ]
        for t in outputs
    ]
    return json.dumps({**json.loads(text), "results": found}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _results(text: str) -> list[tuple[torch.dtype, _Sizes, bool]]:
    """Return each result's type, its sizes (a pair for an input's dimension), and whether all are numbers."""
    return [
        (getattr(torch, dtype), sizes, all(isinstance(n, int) for n in sizes))
        for dtype, sizes in json.loads(text).get("results", ())
    ]


def _check(text: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Compare the types and sizes of results with those that a graph was made for.

    Raises:
        EngineError: they differ.
    """
    for i, ((dtype, sizes, is_plain), output) in enumerate(zip(_results(text), outputs, strict=False)):
        expected: Any = sizes
        if not is_plain:
            expected = [inputs[n[0]].shape[n[1]] if isinstance(n, list) else n for n in sizes]
            if len(expected) == output.dim():
                expected = [n if e is None else e for e, n in zip(expected, output.shape, strict=True)]
        if output.dtype is not dtype or list(output.shape) != expected:
            name = decode_library_call(text).operator.name()
            raise EngineError(
                f"{name}: result {i} is a tensor of {output.dtype} and of shape {list(output.shape)}, but "
                f"its kernel for tensors without data returns {dtype} and {expected}. Correct the "
                f"function passed to torch.library.register_fake({name!r})"
            )


@contextlib.contextmanager
def _drawing_nothing(text: str) -> Iterator[None]:
    """Run a call of an operator without the tag for random numbers, and check that it draws none.

    A graph merges two equal calls of such an operator into one, and may reorder them.

    Raises:
        EngineError: it draws random numbers.
    """
    state = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), state):
        name = decode_library_call(text).operator.name()
        raise EngineError(
            f"{name}: its kernel draws random numbers, which its registration does not declare, so a graph "
            f"may reorder it, or merge two calls. Register {name!r} with "
            f"tags=(torch.Tag.nondeterministic_seeded,)"
        )
    _DRAW_NOTHING.add(text)


class LibraryKernel(Function):
    """One operator of a library, forward and backward, as PyTorch's dispatcher runs it."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the call that ``text`` describes, then a token if it is random."""
        call = decode_library_call(text)
        ctx.set_materialize_grads(False)
        inputs = tensors[: call.tensors]
        is_abstract = private.is_abstract(tensors)
        is_watched = not (is_abstract or call.random or text in _DRAW_NOTHING)
        with (
            private.with_autograd_and_autocast() if is_abstract else _AS_IT_IS,
            _drawing_nothing(text) if is_watched else _AS_IT_IS,
        ):
            if any(ctx.needs_input_grad):
                outputs = forward_with_graph(ctx, call, inputs, runs_without=True)
                # The registered formula determines the outputs that have a gradient.
                edges = zip(outputs, ctx.graph.outputs, strict=True)
                ctx.mark_non_differentiable(*(output for output, edge in edges if edge is None))
            else:
                outputs = call(inputs)
        if not is_abstract:
            _check(text, inputs, outputs)
        if call.random:
            token = torch.zeros(1, dtype=torch.int64)
            ctx.mark_non_differentiable(token)
            return (*outputs, token)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return gradients by the registered formula, called as autograd calls it."""
        graph: AutogradGraph = ctx.graph
        pairs = zip(graph.outputs, grads, strict=False)
        given = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        if not given and graph.zero_edge is not None:
            given = [(graph.zero_edge, torch.empty(0))]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        edges, known = zip(*given, strict=True)
        return backward_of_graph(ctx, edges, known)
