"""Private names of dynamo, and the versions tried.

| name | tried on |
| --- | --- |
| torch._dynamo.backends.common.aot_autograd | 2.11-2.15.0 |
| torch._functorch._aot_autograd.descriptors (TangentAOTInput.output), in a graph's metadata | 2.11-2.15.0 |
| torch._dynamo.variables.misc.AutogradFunctionVariable (call_apply, fn_cls) | 2.11-2.15.0 |
| torch._dynamo.variables: VariableTracker (visit, is_python_constant, source), TensorVariable | 2.13.0 |
| torch._dynamo.variables.functions.BaseUserFunctionVariable | 2.13.0 |
| torch._dynamo.guards (GuardBuilder.ID_MATCH, install_guard) | 2.13.0 |
| torch._dynamo.exc (BackendCompilerFailed, TorchRuntimeError, unimplemented) | 2.13.0 |
| torch._dynamo.output_graph.OutputGraph.root_tx (one_graph) | 2.13.0 |
| torch._C._functorch.is_functorch_wrapped_tensor | 2.11-2.15.0 |
| torch.utils._pytree.tree_map | 2.13.0 |
| torch._dynamo.variables.builder.wrap_fx_proxy | 2.11-2.15.0 |
| TensorVariable (as_proxy); grapharg (example) in a node's meta | 2.13.0 |
| torch._dynamo.symbolic_convert.InstructionTranslatorBase (f_code, lineno, parent) | 2.13.0 |
| torch._dynamo.utils.proxy_args_kwargs, _torchdynamo_orig_backend, _TorchCompileWrapper | 2.11-2.15.0 |
| torch._functorch.config (donated_buffer, force_non_lazy_backward_lowering) | 2.11-2.15.0 |
| torch._C._autograd._get_sequence_nr, torch.autograd.graph.Node._sequence_nr | 2.11-2.15.0 |
| torch._C._jit_resolve_packet | 2.11-2.15.0 |
| torch._dynamo.utils.get_metrics_context (in_progress, _start_time_ns) | 2.11-2.15.0 |
| torch._guards.tracing, TracingContext (fw_metadata.bw_donated_idxs) | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.ShapeEnv (guards, var_to_range), torch.SymInt.node | 2.11-2.15.0 |
| torch._ops (HigherOrderOperator, OpOverload) | 2.11-2.15.0 |
| torch.fx.node._side_effectful_functions, which a function looks up at each call | 2.11-2.15.0 |
| torch.ops.higher_order.tag_activation_checkpoint; recompute in a node's meta | 2.11-2.15.0 |
| partitioner_tag, and desc of a written argument, in a node's meta | 2.11-2.15.0 |
| torch._subclasses.fake_tensor (FakeTensor, unset_fake_temporarily) | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensorMode.from_tensor | 2.11-2.15.0 |
| torch._dynamo.utils.numpy_to_tensor_wrapper (f), torch._numpy.random | 2.11-2.15.0 |
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointPolicy

from torch2ort._torch.autograd import backward_keeps_graph as backward_keeps_graph
from torch2ort.errors import Torch2OrtError
from torch2ort.support.versions import private_names

with private_names("torch"):
    from functorch.compile import default_partition as default_partition  # public, but without types
    from torch._dynamo.backends.common import aot_autograd as aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, unimplemented
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.utils import get_metrics_context, numpy_to_tensor_wrapper, proxy_args_kwargs
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.functions import BaseUserFunctionVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch._functorch import config
    from torch._guards import TracingContext, tracing
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.fx.node import _side_effectful_functions
    from torch.utils._pytree import tree_map

    CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint

_RUN_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def seconds_of_frame() -> float:
    """Return the seconds since dynamo began to compile the code whose graph it passes to the backend."""
    metrics = get_metrics_context()
    return (time.time_ns() - metrics._start_time_ns) / 1e9 if metrics.in_progress() else 0.0


def numpys_draw(node: torch.fx.Node) -> str | None:
    """Return the function of numpy.random that a node of dynamo's graph calls; ``None`` for other nodes."""
    if not isinstance(node.target, numpy_to_tensor_wrapper):
        return None
    function: Any = node.target.f
    return f"numpy.random.{function.__name__}" if function.__module__ == "torch._numpy.random" else None


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Let AOTAutograd compile backward together with forward, and allow ``retain_graph=True``.

    Operators that draw random numbers stay in its graphs, also where the numbers are unused. Enter it while
    dynamo compiles, which one thread at a time does.
    """
    with (
        config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True),
        mock.patch.object(torch.fx.node, "_side_effectful_functions", _WithDraws(_side_effectful_functions)),
    ):
        yield


class _WithDraws(set[Any]):
    """Functions with side effects; for the thread that created the set, also operators that draw numbers."""

    def __init__(self, functions: Iterable[Any]) -> None:
        super().__init__(functions)
        self._thread = threading.get_ident()

    def __contains__(self, function: object) -> bool:
        if super().__contains__(function):
            return True
        is_seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        return is_seeded and threading.get_ident() == self._thread


def lend_no_buffers() -> None:
    """Declare that backward writes to none of its arguments, so it may run twice.

    Call it while forward is compiled. Without this declaration, torch assumes the contrary.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@contextlib.contextmanager
def apart(graph: torch.fx.Graph) -> Iterator[None]:
    """Context in which the running trace records nothing.

    Args:
        graph: the graph of that trace.
    """
    mode = _fake_mode(graph)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        if mode is not None:
            stack.enter_context(tracing(TracingContext(mode)))
        yield


def fake_like(graph: torch.fx.Graph, value: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor of a graph's trace for a constant."""
    mode = _fake_mode(graph)
    return value if mode is None else mode.from_tensor(value, static_shapes=True)


def known_of_sizes(graph: torch.fx.Graph) -> list[Any]:
    """Return the hints, ranges and conditions of the symbolic sizes of a graph's trace, as text."""
    mode = _fake_mode(graph)
    environment = None if mode is None else mode.shape_env
    if environment is None:
        return []
    values = (n.meta.get("val") for n in graph.find_nodes(op="placeholder"))
    shapes: list[Any] = [list(value.shape) for value in values if isinstance(value, torch.Tensor)]
    sizes = [size for shape in shapes for size in shape if not isinstance(size, int)]
    hints = sorted({(str(size), str(size.node.hint)) for size in sizes})
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    ranges = sorted((str(symbol), str(environment.var_to_range.get(symbol))) for symbol in symbols)
    return [hints, ranges, [str(guard.expr) for guard in environment.guards] if symbols else []]


def empty_like(
    graph: torch.fx.Graph, shape: Sequence[int | torch.SymInt], dtype: torch.dtype
) -> torch.Tensor:
    """Return a new fake tensor of a graph's trace, of sizes of that trace."""
    mode = _fake_mode(graph)
    assert mode is not None
    with mode:
        return torch.empty(shape, dtype=dtype)


def _fake_mode(graph: torch.fx.Graph) -> Any:
    for node in graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, FakeTensor):
                return part.fake_mode
    return None


def overload_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """Return the overload of an ATen operator that accepts these arguments."""
    found = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    overload: OpOverload = getattr(getattr(torch.ops.aten, name), found)
    return overload


def steps_so_far() -> int:
    """Return a number that increases with each node that autograd records in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def step_since(before: int, outputs: Sequence[Any]) -> Any:
    """Return the autograd node of a call of AOTAutograd's graph; ``None`` if there is none.

    Args:
        before: the result of :func:`steps_so_far` before the graph was called.
        outputs: the results of the call; some may be views of the node's outputs.
    """
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        while node is not None and node._sequence_nr() >= before:
            if node.name() == "CompiledFunctionBackward":
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def gradients_of(joint: torch.fx.GraphModule, outputs: int) -> dict[str, int]:
    """Map the name of each gradient among a joint graph's arguments to the position of its output.

    Args:
        joint: the graph.
        outputs: the number of its results that are forward's.
    """
    described = list(joint.graph.output_node().meta["desc"])[:outputs]
    tangents = [node for node in joint.graph.nodes if is_tangent(node)]
    return {node.name: described.index(node.meta["desc"].output) for node in tangents}


def writes_of(joint: torch.fx.GraphModule, outputs: int) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Return the arguments of a joint graph that forward writes to, each with its value afterwards.

    Args:
        joint: the graph.
        outputs: the number of its results that are forward's.
    """
    result = joint.graph.output_node()
    arguments = {node.meta.get("desc"): node for node in joint.graph.find_nodes(op="placeholder")}
    written = [getattr(desc, "mutated_input", None) for desc in result.meta["desc"][:outputs]]
    pairs = zip(written, result.args[0], strict=False)  # type: ignore[arg-type]
    return [(arguments[desc], value) for desc, value in pairs if desc is not None]


def runs_again(node: torch.fx.Node) -> bool:
    """Return True if a node of a joint graph is checkpointed: backward recomputes it."""
    return node.meta.get("recompute") in _RUN_AGAIN


def run_in_forward(node: torch.fx.Node) -> None:
    """Let backward read the result of forward for a node of a joint graph."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def of_backward(joint: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of a joint graph that were traced during differentiation; not all are tagged so."""
    nodes = list(joint.graph.nodes)
    marked = [i for i, node in enumerate(nodes) if node.meta.get("partitioner_tag") == "is_forward"]
    return nodes[max(marked, default=-1) + 1 :]


def as_of_backward(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a joint graph's node for a copy of it in backward."""
    return {key: value for key, value in meta.items() if key not in ("partitioner_tag", "recompute", "desc")}


def is_tangent(node: torch.fx.Node) -> bool:
    """Return True if an argument of a joint graph, or of a backward, is the gradient of an output."""
    return node.op == "placeholder" and node.name.startswith("tangents")


class ApplyReplacement(Protocol):
    """A function that chooses the callable that dynamo puts into a graph for a call of a Function."""

    def __call__(
        self,
        function: Any,
        options: dict[str, Any] | None,
        tensors: Sequence[torch.Tensor],
        inputs: Mapping[int, torch.Tensor],
        places: Sequence[tuple[str, int]],
    ) -> Callable[..., Any] | None:
        """Return the callable; ``None`` for dynamo's own handling.

        Args:
            function: the Function.
            options: the options of the graph's backend.
            tensors: the fake tensors among the arguments.
            inputs: the arguments, by position, that are inputs of the graph without any computation.
            places: file and line of the traced calls.
        """


def stand_in_for_apply(backend: Callable[..., Any], stand_in: ApplyReplacement) -> None:
    """Let dynamo put another call into a graph instead of the call of a Function's forward.

    Args:
        backend: the backend of the graphs to which this applies.
        stand_in: chooses the callable. Where it raises, the graph ends before the call; an error of
            torch2ort's from the call is raised as an error of the backend.
    """
    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        wrapper = tx.output.compiler_fn
        while hasattr(wrapper, "_torchdynamo_orig_backend"):
            wrapper = wrapper._torchdynamo_orig_backend
        call = None
        if getattr(wrapper, "compiler_fn", None) is backend:
            options = getattr(wrapper, "kwargs", {}).get("options")
            try:
                call = stand_in(
                    self.fn_cls, options, _tensors_in(args, kwargs), _inputs_among(args), _places_in(tx)
                )
            except Torch2OrtError as error:
                if tx.output.root_tx.one_graph:
                    raise BackendCompilerFailed(tx.output.compiler_fn, error, None) from error
                _end_graph(str(error))
        if call is None:
            return original(self, tx, args, kwargs)
        held = _Held(args, kwargs)
        with _as_the_backends(tx):
            try:
                proxy = tx.output.create_proxy("call_function", held.filling(call), tuple(held.given), {})
                return wrap_fx_proxy(tx=tx, proxy=proxy)
            except NotImplementedError as error:
                _end_graph(f"{self.fn_cls.__name__}: no graph holds an {error}")
            except (TorchRuntimeError, IndexError) as error:
                if _named(error) is not None or tx.output.root_tx.one_graph:
                    raise
                # The error is forward's own, or caused by fake values. Eager PyTorch raises it, or succeeds.
                _end_graph(f"{self.fn_cls.__name__}: forward raised {error!r}")

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


def _inputs_among(args: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the real tensor of each argument, by position, that is itself an input of the graph."""
    found = {}
    for i, argument in enumerate(args):
        node = argument.as_proxy().node if isinstance(argument, TensorVariable) else None
        given = None if node is None or node.op != "placeholder" else node.meta.get("grapharg")
        if given is not None and isinstance(given.example, torch.Tensor):
            found[i] = given.example
    return found


def _places_in(tx: Any) -> list[tuple[str, int]]:
    """Return file and line of the calls that dynamo traces."""
    places = []
    while tx is not None:
        places.append((tx.f_code.co_filename, tx.lineno))
        tx = getattr(tx, "parent", None)
    return places


@contextlib.contextmanager
def _as_the_backends(tx: Any) -> Iterator[None]:
    """Raise errors of torch2ort as dynamo raises the errors of a backend, and not as dynamo's own."""
    try:
        yield
    except Exception as error:
        named = _named(error)
        if named is None:
            raise
        raise BackendCompilerFailed(tx.output.compiler_fn, named, None) from named


def _named(error: BaseException) -> Torch2OrtError | None:
    """Return the error of torch2ort that is the cause of an error of dynamo; ``None`` if there is none."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in seen):
        if isinstance(cause, Torch2OrtError):
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(variable: Any) -> None:
        if isinstance(variable, TensorVariable):
            value = variable.as_proxy().node.meta.get("example_value")
            found.extend([value] if isinstance(value, torch.Tensor) else ())

    VariableTracker.visit(note, (args, kwargs))
    return found


def _end_graph(reason: str) -> NoReturn:
    """Let dynamo run a call between two graphs, in eager PyTorch."""
    unimplemented(gb_type="call of a Function", context="", explanation=reason, hints=[])


class _Held:
    """The arguments of a call: those that a graph computes, and the Python objects around them.

    A graph holds tensors and sizes. The objects keep their Python types: fx would convert some to other
    lists, and dynamo some to other types.

    Attributes:
        given: the values that the graph passes to the call.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.given: list[Any] = []
        self._args = [self._part(value) for value in args]
        self._kwargs = {key: self._part(value) for key, value in kwargs.items()}
        VariableTracker.visit(_guard_function, (args, kwargs))

    def filling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` as a function of the values of :attr:`given`."""

        def filled(*given: Any) -> Any:
            args = [part(given) for part in self._args]
            return call(*args, **{key: part(given) for key, part in self._kwargs.items()})

        filled.__name__ = filled.__qualname__ = call.__name__
        return filled

    def _part(self, variable: Any) -> Callable[[Sequence[Any]], Any]:
        if variable.is_python_constant():
            value = variable.as_python_constant()
            return lambda given: value
        ((value,), _) = proxy_args_kwargs((variable,), {})

        def placed(leaf: Any) -> Any:
            self.given.append(leaf)
            return _Place(len(self.given) - 1)

        tree = tree_map(placed, value)
        return lambda given: tree_map(lambda place: given[place.number], tree)


@dataclass(frozen=True)
class _Place:
    number: int


def _guard_function(variable: Any) -> None:
    """Guard a graph that holds a function on that function's identity; dynamo compares only its code."""
    if not isinstance(variable, BaseUserFunctionVariable):
        return
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        return
    function = variable.as_python_constant()
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        _end_graph(f"{function.__qualname__} holds values that no guard compares")


def in_transform(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if some tensors are wrappers of a torch.func transform."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` as a function that dynamo does not trace."""
    hidden: Callable[..., Any] = torch.compiler.disable(run, reason="it calls a compiled graph")
    return hidden


def boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Mark ``run`` as boxed: AOTAutograd calls it with one list, which ``run`` may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
