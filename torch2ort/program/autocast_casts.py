"""Insertion of the casts of ``torch.autocast`` into a program, as a trace does not contain them.

A trace records the state of autocast at each operator. The operator gets the casts that PyTorch makes: it is
run on tensors without data, with autocast and without, and the computations of the two runs are compared.
There is no list of operators here; where casts do not explain the difference, an error says so.

An operator that casts inside of its kernel (a recurrent net, ``nn.Bilinear``) runs in that kernel, with
autocast on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch2ort._torch import decompositions as private
from torch2ort._torch.dispatch import OperatorRecorder, has_autocast, traced
from torch2ort._torch.fake_tensors import FakeTensor
from torch2ort.capture.autocast import NOTE
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.custom_ops import is_of_library
from torch2ort.kernels.recurrent import is_recurrent
from torch2ort.program.gradient_flow import carrying, is_required
from torch2ort.program.kernel_sites import SiteMaker
from torch2ort.program.target import Target
from torch2ort.pythonop import Site
from torch2ort.pythonop.autocast import Autocast, autocast_context
from torch2ort.support.provenance import origin_of, source_line

aten = torch.ops.aten
_CAST = aten._to_copy.default
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
# Operators whose kernels on CPU call others with arguments that autocast casts, among 419 that were tried.
_CASTS_INSIDE = frozenset({aten._trilinear.default, aten.linalg_pinv.atol_rtol_tensor})


def insert_autocast_casts(
    graph_module: torch.fx.GraphModule, model: torch.nn.Module, target: Target, *, gradients: bool
) -> list[Site]:
    """Insert autocast's casts in front of the operators of a program, and of the regions in it.

    Args:
        graph_module: the program; changed in place.
        model: the module that was traced.
        target: the runtime of the program.
        gradients: True if autograd recorded.

    Returns:
        The sites of the kernels that cast inside, which live as long as the caller keeps them.

    Raises:
        UnsupportedOperatorError: autocast changes an operator by more than casts of its arguments.
    """
    casted = [
        module
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        and any(_state(node) is not None for node in module.graph.nodes)
    ]
    if not casted:
        return []
    _refuse_fast_path(graph_module, model, gradients=gradients)
    sites: list[Site] = []
    for module in casted:
        # A region has no gradients, or is inside of one that has none.
        is_clear = module is graph_module or not _has_regions_with_gradient(graph_module)
        inputs = module.graph.find_nodes(op="placeholder") if module is graph_module else ()
        carries = carrying(module.graph, filter(is_required, inputs)) if target.is_trained else None
        maker = None
        if target.has_kernels and is_clear:
            maker = SiteMaker(module.graph, carries, has_libraries=target.has_libraries)
        settler = _Settler(module.graph, maker, has_libraries=target.has_libraries)
        settler.run()
        sites += settler.sites
        module.recompile()
    return sites


def _has_regions_with_gradient(graph_module: torch.fx.GraphModule) -> bool:
    """Return True if some region of a program is one of ``torch.enable_grad()``."""
    return any(
        node.args[0] is True
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.find_nodes(op="call_function", target=_REGION)
    )


def _refuse_fast_path(graph_module: torch.fx.GraphModule, model: torch.nn.Module, *, gradients: bool) -> None:
    """Refuse layers that eager computes with one kernel in evaluation, which no trace contains.

    The kernel returns results in half precision where the layer's parts return float32.
    """
    inputs = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    if gradients and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
        return
    for name, layer in model.named_modules():
        fast = isinstance(layer, torch.nn.TransformerEncoderLayer) and not layer.training
        if fast and layer.self_attn.batch_first and torch.backends.mha.get_fastpath_enabled():
            raise UnsupportedOperatorError(
                f"the layer '{name}' is a torch.nn.TransformerEncoderLayer in evaluation under "
                f"torch.autocast, for which eager PyTorch has a fast path whose results are of another type. "
                f"Call torch.backends.mha.set_fastpath_enabled(False)"
            )


def _refused(node: torch.fx.Node, state: Autocast, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{node.target} at {source_line(node)} runs under torch.autocast, which {what}, and a graph cannot. "
        f"Put it into a `with torch.autocast({state.kinds[0]!r}, enabled=False):`, or into a "
        f"torch.autograd.Function"
    )


def _state(node: torch.fx.Node) -> Autocast | None:
    note = node.meta.get(NOTE)
    return note.state if note is not None and note.state.is_on else None


class _Settler:
    """Insertion of the casts into one graph.

    Args:
        graph: the graph; changed in place.
        maker: makes calls of kernels that cast inside; ``None`` where such calls are impossible.
        has_libraries: True if operators of libraries may be called.
    """

    def __init__(self, graph: torch.fx.Graph, maker: SiteMaker | None, *, has_libraries: bool) -> None:
        self._graph, self._maker, self._has_libraries = graph, maker, has_libraries
        # Casts of parameters that autocast caches, by node and region. The cache ignores their dtype.
        self._kept: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}

    @property
    def sites(self) -> Collection[Site]:
        """The sites of the calls of kernels that were made."""
        return () if self._maker is None else self._maker.sites

    def run(self) -> None:
        """Insert casts for every node."""
        for node in list(self._graph.nodes):
            self._settle(node)

    def _settle(self, node: torch.fx.Node) -> None:
        if is_recurrent(node.target):
            # The keywords contain the types of the stand-in's results; the net itself determines them.
            node.kwargs = {}
        state = _state(node)
        if state is not None and self._has_libraries and is_of_library(node.target):
            # Its kernel may call operators whose arguments autocast casts.
            self._keep_whole(node, state)
            return
        if state is None or not _may_be_cast(node, state):
            return
        if is_recurrent(node.target):
            self._keep_whole(node, state)
            return
        probe = _Probe(node)
        casted = probe.log(state)
        if casted is None and probe.log(None) is None:
            # A kernel in C++ does not accept sizes that vary, so its casts are unknown.
            raise _refused(node, state, "may cast inside of it where sizes vary")
        if casted is None:
            return  # The user's own error, which the trace did not raise either.
        if any(call[0] in _CASTS_INSIDE for call in casted.calls):
            self._keep_whole(node, state)
            return
        plain = probe.log(None)
        if plain is not None and plain.calls == casted.calls:
            return
        if has_autocast(node.target, state.kinds):
            for casts in _possible(casted.casts, {} if plain is None else plain.casts, state):
                same = probe.log(None, casts)
                if same is not None and same.calls == casted.without(casts):
                    self._cast(node, casts)
                    return
        elif node.target._can_decompose():  # type: ignore[union-attr]
            self._expand(node, state)
            return
        raise _refused(node, state, "does more to it than to cast its arguments")

    def _keep_whole(self, node: torch.fx.Node, state: Autocast) -> None:
        if self._maker is None:
            raise _refused(node, state, "casts inside of it")
        # A cache would hold casts of a tensor of the runtime's, for longer than the tensor lives.
        self._maker.replace(node, state._replace(cache=False))

    def _cast(self, node: torch.fx.Node, casts: Mapping[torch.fx.Node, torch.dtype]) -> None:
        for source, dtype in casts.items():
            node.replace_input_with(source, self._insert_cast(node, source, dtype))

    def _insert_cast(self, node: torch.fx.Node, source: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        note = node.meta[NOTE]
        key = (source, note.region)
        kept = note.state.cache and _is_parameter(source) and dtype in {d for _, _, d in note.state.devices}
        if kept and key in self._kept:
            return self._kept[key]
        with self._graph.inserting_before(node):
            cast = self._graph.call_function(_CAST, (source,), {"dtype": dtype})
        cast.meta = origin_of(node)
        value = source.meta["val"]
        with value.fake_mode:
            cast.meta["val"] = value.to(dtype)
        if kept:
            self._kept[key] = cast
        return cast

    def _expand(self, node: torch.fx.Node, state: Autocast) -> None:
        """Replace a composite by the operators that it calls, casts among them."""
        inputs = node.all_input_nodes

        def run(*values: Any) -> Any:
            given = dict(zip(inputs, values, strict=True))
            arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            with autocast_context(state._replace(cache=False)):
                return node.target(*arguments, **keywords)  # type: ignore[operator]

        values = [n.meta["val"] for n in inputs]
        parts = traced(run, [v.detach() if isinstance(v, torch.Tensor) else v for v in values])
        copies: dict[torch.fx.Node, Any] = dict(zip(parts.find_nodes(op="placeholder"), inputs, strict=True))
        with self._graph.inserting_before(node):
            for part in parts.nodes:
                source = copies.get(part.args[0]) if part.target is _CAST else None
                if source in inputs and part.kwargs.keys() == {"dtype"}:
                    copies[part] = self._insert_cast(node, source, part.kwargs["dtype"])
                elif part.op == "call_function":
                    copies[part] = self._graph.node_copy(part, copies.__getitem__)
                    copies[part].meta["stack_trace"] = node.meta.get("stack_trace")
        _replace(node, torch.fx.node.map_arg(parts.output_node().args[0], copies.__getitem__))


def _possible(
    casts: dict[torch.fx.Node, torch.dtype], own: Mapping[torch.fx.Node, torch.dtype], state: Autocast
) -> Iterator[dict[torch.fx.Node, torch.dtype]]:
    """Yield the sets of casts that may be those of autocast: all, or some.

    A kernel may cast arguments itself, as attention does in half precision with a mask.

    Args:
        casts: the first casts of arguments under autocast.
        own: the first casts without it.
        state: state of autocast.
    """
    lower = {dtype for _, _, dtype in state.devices}
    yield casts
    yield {node: dtype for node, dtype in casts.items() if own.get(node) is not dtype}
    yield {node: dtype for node, dtype in casts.items() if dtype in lower}


def _replace(node: torch.fx.Node, result: Any) -> None:
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _is_parameter(node: torch.fx.Node) -> bool:
    """Return True if autocast caches casts of ``node``: a leaf of float32 that requires a gradient."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor):
        return False
    return value.requires_grad and value.dtype is torch.float32


def _may_be_cast(node: torch.fx.Node, state: Autocast) -> bool:
    """Return True if autocast may change ``node``."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, private.OpOverload):
        return False
    own = has_autocast(target, state.kinds) or target._can_decompose()
    if not (own or target in _CASTS_INSIDE or is_recurrent(target)):
        return False
    # A view needs no cast of its own.
    if any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns):
        return False
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return any(
        isinstance(v, torch.Tensor)
        and v.device.type in state.kinds
        and v.is_floating_point()
        and v.dtype is not torch.float64
        for v in values
    )


class _Log(NamedTuple):
    """Record of one run of an operator.

    Attributes:
        calls: each operator that was called, with the dtypes of its arguments and results.
        first: the arguments that were cast, and the index of the first call that cast each.
    """

    calls: list[Any]
    first: dict[torch.fx.Node, int]

    @property
    def casts(self) -> dict[torch.fx.Node, torch.dtype]:
        """The dtype of the first cast of each argument that was cast."""
        return {node: self.calls[i][2][0] for node, i in self.first.items()}

    def without(self, nodes: Collection[torch.fx.Node]) -> list[Any]:
        """Return the calls without the first cast of each of ``nodes``."""
        dropped = {self.first[node] for node in nodes}
        return [call for i, call in enumerate(self.calls) if i not in dropped]


class _Probe:
    """Runs of one node's operator on tensors without data."""

    def __init__(self, node: torch.fx.Node) -> None:
        self._node = node
        values = [n.meta["val"] for n in node.all_input_nodes]
        self._mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        self._writes = node.target._schema.is_mutable  # type: ignore[union-attr]

    def log(
        self, state: Autocast | None, casts: Mapping[torch.fx.Node, torch.dtype] | None = None
    ) -> _Log | None:
        """Run the operator and record its calls; return ``None`` if it refuses its arguments.

        Args:
            state: state of autocast.
            casts: arguments to pass in another dtype.
        """
        casts = casts or {}
        with self._mode, torch.enable_grad():
            given = {n: self._value(n, casts.get(n)) for n in self._node.all_input_nodes}
            arguments, keywords = torch.fx.node.map_arg(
                (self._node.args, self._node.kwargs), given.__getitem__
            )
            names = {id(value): n for n, value in given.items() if isinstance(value, torch.Tensor)}
            recorded = OperatorRecorder()
            # A cached cast would be missing in the next run.
            with autocast_context(None if state is None else state._replace(cache=False)), recorded:
                try:
                    self._node.target(*arguments, **keywords)  # type: ignore[operator]
                except (RuntimeError, TypeError):
                    return None
        first: dict[torch.fx.Node, int] = {}
        calls = []
        for i, (operator, taken, result) in enumerate(recorded.calls):
            calls.append((operator, *([t.dtype for t in tensors] for tensors in (taken, result))))
            source = names.get(id(taken[0])) if operator is _CAST and taken else None
            if source is not None:
                first.setdefault(source, i)
        return _Log(calls, first)

    def _value(self, node: torch.fx.Node, dtype: torch.dtype | None) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach() if dtype is None else value.detach().to(dtype)
        needs = node.meta["val"].requires_grad and not self._writes
        return value.requires_grad_() if needs else value
