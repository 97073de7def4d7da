"""Calls of a compiled graph: from AOTAutograd's arguments to a session's, and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.dynamo.context_tokens import run_of, token_of
from torch2ort.dynamo.none_grads import Edge, UndefinedGradients
from torch2ort.dynamo.tensor_only_graph import OutputSource, SessionMapping
from torch2ort.dynamo.undefined_grads import take_missing
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.options import Options
from torch2ort.pythonop.native import native
from torch2ort.runtime.native_sites import original_feeds
from torch2ort.runtime.step_io import Passing
from torch2ort.runtime.step_session import Bindings, HalfSession
from torch2ort.sizes import expressions
from torch2ort.support.startup_timing import FIRST_RUN, Startup
from torch2ort.training.undefined_grads import LEFT_OUT, refuse_nan

# A function from the values of the symbols to a number of a call.
_Number = Callable[[dict[str, int]], int]


class GraphRunner:
    """A graph of AOTAutograd that runs in a session.

    Args:
        kind: ``"inference"``, ``"forward"`` or ``"backward"``.
        lowered: the graph as ONNX.
        interface: maps the graph's arguments and results to the session's.
        bindings: the sites that its nodes call; a backward shares those of its forward.
        options: threads and debugging.
        startup: the start to which the first run belongs.
        gradients: of a backward: position of an output of forward -> position of its gradient's argument.
        without: builds the graph for a backward in which the gradients at the given positions are undefined.
        left_out: of a backward: determines the results that are ``None`` because Functions returned ``None``.
    """

    def __init__(
        self,
        kind: str,
        lowered: Lowered,
        interface: SessionMapping,
        bindings: Bindings,
        options: Options,
        startup: Startup,
        gradients: Mapping[int, int] | None = None,
        without: Callable[[frozenset[int]], GraphRunner] | None = None,
        left_out: UndefinedGradients | None = None,
    ) -> None:
        self._kind = kind
        # None once the start is over.
        self._startup: Startup | None = startup
        self._has_run = False
        self._gradients = gradients or {}
        self._without = None if without is None else functools.cache(without)
        # onnxruntime refuses a graph without nodes.
        self._session = None
        self._has_originals = False
        if lowered.proto.graph.node:
            name = f"compiled_{kind}"
            passing = _passing(interface, len(lowered.outputs))
            fed = {n: s for n, s in zip(lowered.inputs, passing.sources, strict=True) if isinstance(s, int)}
            originals = original_feeds(lowered.proto.graph, lowered.calls, fed)
            bindings.set_originals(originals)
            self._has_originals = bool(originals)
            self._session = HalfSession(
                name, lowered, bindings, options, passing, frees_early=kind == "backward"
            )
        self._interface, self._bindings, self._left_out = interface, bindings, left_out
        self._outputs = [_Result(output) for output in interface.outputs]
        # Two gradients must not share memory, as the caller may write to each.
        self._shares = kind != "backward"
        # True if the results are the session's outputs, in the same order.
        self._is_fetched = interface.outputs == tuple(
            OutputSource(fetched=i) for i in range(len(lowered.outputs))
        )

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Compute the results for AOTAutograd's arguments.

        Args:
            arguments: tensors and numbers; emptied.

        Raises:
            EngineError: ONNX Runtime failed, or a gradient has a NaN where a Function's backward returned
                ``None``.
        """
        return self._run_all(arguments) if self._startup is None else self._starting(arguments)

    def _starting(self, arguments: list[Any]) -> list[Any]:
        """Run the first call, which is a part of the start, or the call after which the start is over."""
        startup = self._startup
        assert startup is not None
        # Backward's first run belongs to the start. Without a backward, the next forward ends the start.
        if self._has_run or self._kind != "forward":
            self._startup = None
        with contextlib.nullcontext() if self._has_run else startup.recording(FIRST_RUN):
            self._has_run = True
            results = self._run_all(arguments)
        if self._startup is None:
            startup.log()
        return results

    def _run_all(self, arguments: list[Any]) -> list[Any]:
        """See :meth:`__call__`."""
        if self._without is not None:
            missing = frozenset(self._gradients[i] for i in take_missing() if i in self._gradients)
            if missing:
                return self._without(missing)(arguments)
        interface = self._interface
        tensors = [arguments[i] for i in interface.tensors]
        sizes = {
            name: arguments[i] if axis is None else arguments[i].shape[axis]
            for name, (i, axis) in interface.symbols.items()
        }
        if interface.carried:
            tensors.append(torch.empty([*(sizes[s] for s in interface.carried), 0], dtype=torch.int64))
        given = {o.argument: arguments[o.argument] for o in interface.outputs if o.argument is not None}
        run = native.Run() if interface.token is None else run_of(arguments[interface.token])
        arguments.clear()
        fetched, undefined = self._run(tensors, run)
        del tensors
        results: list[Any] = fetched if self._is_fetched else self._results(fetched, given, sizes, run)
        if self._left_out is not None and undefined:
            for i in self._left_out.results(undefined):
                results[i] = None
            refuse_nan((r for r in results if isinstance(r, torch.Tensor)), LEFT_OUT, "torch.compile")
        return results

    def _run(
        self, tensors: Sequence[torch.Tensor], run: native.Run
    ) -> tuple[list[torch.Tensor], frozenset[Edge]]:
        """Return the session's outputs, and the arguments for which Functions' backward returned ``None``."""
        if self._session is None:
            return [], frozenset()
        if self._interface.token is None:
            if self._has_originals:
                run.originals = tuple(tensors)
            found, _ = self._session.run(None, tensors, run)
            run.originals = None
            return found, frozenset()
        run.keeps = private.backward_keeps_graph()
        run.undefined.clear()
        left_out = self._left_out
        if left_out is not None:
            names = self._bindings.names
            run.arrivals = lambda site: left_out.defined_output_gradients(names[site], self._edges(run))
        found, _ = self._session.run(None, tensors, run)
        run.arrivals = None
        undefined = self._edges(run)
        if not run.keeps:
            run.clear()
        return found, undefined

    def _edges(self, run: native.Run) -> frozenset[Edge]:
        return frozenset((self._bindings.names[site], argument) for site, argument in run.undefined)

    def _results(
        self, fetched: Sequence[torch.Tensor], given: dict[int, Any], sizes: dict[str, int], run: native.Run
    ) -> list[Any]:
        results: list[Any] = []
        taken: set[int] = set()
        for result in self._outputs:
            output = result.output
            if output.token:
                results.append(token_of(run))
            elif output.argument is not None:
                results.append(given[output.argument])
            elif output.fetched is None:
                results.append(None if result.number is None else result.number(sizes))
            else:
                tensor = fetched[output.fetched]
                if not self._shares and output.fetched in taken:
                    tensor = tensor.clone()
                taken.add(output.fetched)
                results.append(
                    tensor if result.strides is None else _restrided(tensor, result.strides(sizes))
                )
        return results


def _passing(interface: SessionMapping, outputs: int) -> Passing:
    """Return the feeds of a graph's session: tensors, the carrier of sizes, and constants."""
    count = len(interface.tensors) + bool(interface.carried)
    sources: list[int | torch.Tensor] = [*range(count), *interface.constants]
    if interface.order:
        sources = [sources[i] for i in interface.order]
    return Passing(tuple(sources), count, tuple(range(outputs)))


class _Result:
    """One result of a graph, with the functions that compute its numbers."""

    def __init__(self, output: OutputSource) -> None:
        self.output = output
        self.number = None if output.number is None else _number(output.number)
        parts = None if output.strides is None else [_number(text) for text in output.strides]
        self.strides = None if parts is None else lambda sizes: [part(sizes) for part in parts]


def _number(text: str) -> _Number:
    """Compile an expression to a function of the symbols' values."""
    expression = expressions.parse(text)
    if expression.is_Integer:
        fixed = int(expression)
        return lambda sizes: fixed
    return lambda sizes: int(expressions.evaluate(expression, sizes))


def _restrided(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy a tensor to the memory layout that it has in eager PyTorch."""
    own = tensor
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis] > 1:
            own = own.narrow(axis, 0, 1)
    made = torch.empty_strided(own.shape, strides, dtype=tensor.dtype).copy_(own)
    return made.expand(tensor.shape)
