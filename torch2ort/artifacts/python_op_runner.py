"""Training files that call Functions: their sessions need PyTorch and torch2ort's custom operators.

This module is only imported for such a file, as no other module of the package needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch  # before modules that need it, so that the error names it

from torch2ort.errors import EngineError, FunctionNotFoundError, ModelLoadError, OptionError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.graph.graph_traversal import FORWARD_ATTRIBUTE, load_sites
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.pythonop import Site, classes_given
from torch2ort.pythonop.autocast import off
from torch2ort.pythonop.native import native
from torch2ort.runtime import onnxruntime, stock
from torch2ort.runtime.contexts import contexts_in
from torch2ort.runtime.native_sites import Callee
from torch2ort.runtime.step_session import Bindings, bind_half

Numbers = Callable[[], tuple[int, int]]


class FunctionRuns:
    """A runner of one file whose nodes call Functions.

    Args:
        content: of the file.
        path: of the file, for errors.
        functions: classes that it may call, besides those that are registered.
        numbers: returns seed and step, which seed the random numbers of Functions.
        providers: of the sessions; ``None`` for the CPU.

    Attributes:
        content: the ONNX model, whose nodes call the Functions of this process.

    Raises:
        ModelLoadError: a node is damaged, or a class does not accept the arguments of its calls in the file.
        FunctionNotFoundError: a class was not supplied.
        RegistryError: ``functions`` is not a list of classes.
    """

    def __init__(
        self,
        content: bytes,
        path: str,
        functions: Iterable[Any],
        numbers: Numbers,
        providers: Sequence[Any] | None,
    ) -> None:
        model, functions = onnx.load_from_string(content), classes_given(functions)
        try:
            calls = load_sites(model.graph)
            derivatives = _derivatives(model.graph, calls)
            _refuse_missing(path, calls.values(), functions)
            bind_classes(calls.values(), functions)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        self._path, self._numbers = path, numbers
        self._draws = any(site.known_result.uses_rng for site in calls.values())
        bindings = Bindings(providers)
        # Nodes find the callees as long as this object holds them.
        self._callees: list[Callee] = bind_half(model.graph, Lowered(model, calls, derivatives), bindings)
        names = {site.key: site.func_name for site in calls.values()}
        self._names = {key: names[site] for key, site in bindings.names.items()}
        self.content: bytes = model.SerializeToString()

    def prepare(self, options: Any) -> None:
        """Prepare options for a session that calls Functions.

        Raises:
            OptionError: the options run nodes on several threads at once.
        """
        if options.execution_mode != onnxruntime().ExecutionMode.ORT_SEQUENTIAL:
            raise OptionError(
                f"session_options.execution_mode={options.execution_mode}: expected ORT_SEQUENTIAL, as the "
                f"training step calls Functions, whose contexts belong to the thread of the step"
            )
        stock.register_library(options)

    def run(self, session: Any, binding: Any) -> None:
        """Run a session over :attr:`content`.

        Raises:
            EngineError: onnxruntime failed, or a backward left out a gradient. An exception of a Function
                is propagated unchanged.
        """
        failure: BaseException | None = None
        contexts = native.Run()
        with contexts_in(contexts), torch.no_grad(), off(), self._drawing():
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                failure = stock.take_error(error)
                if failure is None:
                    failure = EngineError(f"onnxruntime failed in a training step: {error}")
                    failure.__cause__ = error
        undefined = sorted(contexts.undefined)
        contexts.clear()
        # Raised outside of the handler, which would make onnxruntime's error the context of the Function's.
        if failure is not None:
            raise failure
        for key, argument in undefined:
            raise EngineError(
                f"{self._path}: {self._names[key]}.backward left out the gradient of argument {argument}, "
                f"which needs one. Eager PyTorch does not update a parameter without a gradient; a file "
                f"updates it with zeros: return torch.zeros_like of the argument if that is what you want"
            )

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Seed the random numbers of Functions by seed and step; restore PyTorch's generators afterwards."""
        if not self._draws:
            yield
            return
        text = "/".join(map(str, self._numbers()))
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
            yield


def _derivatives(graph: onnx.GraphProto, calls: Mapping[str, Site]) -> dict[str, Site]:
    """Return the site whose backward each PythonOpGrad node runs, by the node's name.

    Raises:
        ModelLoadError: a node does not name a PythonOp node.
    """
    found: dict[str, Site] = {}
    for node in graph.node:
        if node.op_type != "PythonOpGrad":
            continue
        name = next((a.s.decode() for a in node.attribute if a.name == FORWARD_ATTRIBUTE), "")
        if name not in calls:
            raise ModelLoadError(
                f"the node '{node.name}' runs the backward of '{name}', expected one of {sorted(calls)}; "
                f"export the training step again"
            )
        found[node.name] = calls[name]
    return found


def _refuse_missing(path: str, sites: Iterable[Site], functions: Sequence[Any]) -> None:
    missing = set()
    for site in sites:
        try:
            bind_classes([site], functions)
        except FunctionNotFoundError:
            missing.add(site.func_name)
    if missing:
        raise FunctionNotFoundError(
            f"{path}: the training step calls {', '.join(sorted(missing))}, and no class of that name was "
            f"supplied. Pass it to TrainingSession(folder, functions=[...]), or register it with "
            f"torch2ort.register_function"
        )
