"""Conversion of a graph of AOTAutograd to one of tensors alone, which a session runs.

In AOTAutograd's graph a symbolic size is a number: an argument, an output, or an operand of nodes. In the
converted graph, nodes read each size from the shape of a tensor. All other numbers are computed outside of
the session.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.split import Half, Split, copied_node, placeholder_of
from torch2ort.differentiate.symbolic_shapes import SizeNodes, carried, settle_sizes, symbols_in, written
from torch2ort.dynamo.unsupported_graphs import refuse
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.keep_raising_ops import force_computation
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.sizes import expressions

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
# Assertions that held when the graph was traced.
_CHECKED_ALREADY = frozenset({aten._assert_tensor_metadata.default})
_OUT = "Compile with dynamic=False"


@dataclass(frozen=True)
class OutputSource:
    """The source of one result of a graph: one of the first four attributes; without them, it is ``None``.

    Attributes:
        token: True for the token that connects the backward of Functions to their forward.
        fetched: position among the session's outputs.
        argument: position among the graph's arguments, if it is one of them.
        number: a number as an expression over symbols, as text.
        strides: expressions over symbols, where the tensor is not contiguous.
    """

    token: bool = False
    fetched: int | None = None
    argument: int | None = None
    number: str | None = None
    strides: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SessionMapping:
    """The map from a graph's arguments and results to its session's inputs and outputs.

    Attributes:
        tensors: positions of the arguments that are fed.
        carried: symbols that are the dimensions of a further tensor without elements, fed after those.
        constants: the graph's own tensors, fed last.
        token: position of the argument that finds the contexts of forward's Functions; ``None`` if there is
            none.
        symbols: for each needed symbol, an argument and its dimension; ``None`` if the argument is a number.
        outputs: the graph's results.
        order: positions of the session's inputs among these feeds, where the order differs.
    """

    tensors: tuple[int, ...]
    carried: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    token: int | None
    symbols: Mapping[str, tuple[int, int | None]]
    outputs: tuple[OutputSource, ...]
    order: tuple[int, ...] = ()


@dataclass
class _Parts:
    """A copy of a graph, with its arguments by kind.

    Attributes:
        graph: the copy; its nodes have symbolic numbers for sizes.
        tensors: placeholder of a tensor -> its position among the arguments.
        numbers: position of an argument that is no tensor -> its value in the trace.
        constants: node of one of the graph's own tensors -> the tensor.
        tokens: node that connects the backward of Functions to their forward -> its position if it is an
            argument.
    """

    graph: torch.fx.Graph
    tensors: dict[torch.fx.Node, int] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)
    constants: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)
    tokens: dict[torch.fx.Node, int | None] = field(default_factory=dict)

    @property
    def token(self) -> int | None:
        """Position of the argument that is a token; ``None`` if there is none."""
        return next((position for position in self.tokens.values() if position is not None), None)


def tensors_only(
    graph_module: torch.fx.GraphModule, restrided: int, missing: frozenset[int] = frozenset()
) -> tuple[Half, SessionMapping]:
    """Convert a graph to a graph of tensors with the same results.

    Args:
        graph_module: AOTAutograd's graph; it is not changed.
        restrided: the number of first results that get their strides of eager PyTorch.
        missing: positions of the arguments of a backward that are undefined gradients.

    Raises:
        UnsupportedOperatorError: no session can run it.
    """
    parts = _parts(graph_module)
    refuse(parts.graph)
    settle_sizes(parts.graph, way_out=_OUT)
    if missing:
        return _without(parts, missing)
    outputs, fetched = _outputs(parts, restrided)
    wanted = _symbols_of_nodes(parts)
    half, carrying = _half(parts, fetched, wanted)
    texts = [text for output in outputs for text in (output.number, *(output.strides or ())) if text]
    interface = SessionMapping(
        tensors=tuple(parts.tensors.values()),
        carried=carrying,
        constants=tuple(parts.constants.values()),
        token=parts.token,
        symbols=_sources(parts, {*carrying, *_names_in(texts)}),
        outputs=outputs,
    )
    return half, interface


def _without(parts: _Parts, missing: frozenset[int]) -> tuple[Half, SessionMapping]:
    """Build the backward in which some outputs have no gradient, with the Split of the training engine."""
    results: list[Any] = list(parts.graph.output_node().args[0])  # type: ignore[arg-type]
    _tell_sizes(parts)
    tangents = {n: i for n, i in parts.tensors.items() if private.is_tangent(n)}
    joint = Joint(
        graph_module=torch.fx.GraphModule(torch.nn.Module(), parts.graph),
        inputs={
            **{n: i for n, i in parts.tensors.items() if n not in tangents},
            **{n: ~i for i, n in enumerate(parts.constants)},
        },
        tangents=tangents,
        outputs=(),
        written={},
        gradients={i: n for i, n in enumerate(results) if isinstance(n, torch.fx.Node)},
        shared=frozenset(),
    )
    half, gradients = Split(joint).backward(missing)
    where = {node: i for i, node in enumerate(half.outputs)}
    fed = [n for n in half.inputs if n in parts.tensors]
    sizes = [n for n in half.inputs if n not in parts.tensors and n not in parts.constants]
    constants = [n for n in half.inputs if n in parts.constants]
    carrying = tuple(carried(sizes[0].meta["val"])) if sizes else ()
    given = [*fed, *sizes, *constants]
    interface = SessionMapping(
        tensors=tuple(parts.tensors[n] for n in fed),
        carried=carrying,
        constants=tuple(parts.constants[n] for n in constants),
        token=parts.token,
        symbols=_sources(parts, set(carrying)),
        outputs=tuple(
            OutputSource(fetched=where[gradients[i]]) if i in gradients else OutputSource()
            for i in range(len(results))
        ),
        order=tuple(given.index(n) for n in half.inputs),
    )
    return half, interface


def _tell_sizes(parts: _Parts) -> None:
    """Add a tensor to the graph whose dimensions are the sizes that only gradients have.

    Raises:
        UnsupportedOperatorError: no argument has a size that the graph computes with.
    """
    known = _sizes(parts)
    missing = _symbols_of_nodes(parts) - known.keys()
    if missing:
        _refuse_size(min(missing))
    tensors = [node for node in parts.tensors if not private.is_tangent(node)]
    untold = known.keys() - {symbol for node in tensors for symbol in carried(node.meta["val"])}
    if untold:
        with parts.graph.inserting_before(next(iter(parts.graph.nodes))):
            _add_carrier(parts, parts.graph, sorted(untold))


def _parts(graph_module: torch.fx.GraphModule) -> _Parts:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    result = graph.graph_copy(graph_module.graph, copies)
    graph.output(result)
    parts = _Parts(graph)
    for position, original in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        node = copies[original]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            parts.tensors[node] = position
        elif isinstance(value, (int, float, torch.SymInt)):
            parts.numbers[position] = value
            _put_in_place(node, value)
        else:
            raise UnsupportedOperatorError(
                f"the graph gets a {type(value).__name__} ({node.name}), and a session takes tensors and "
                f"sizes alone. Exclude the code that passes it from the compiled code, with "
                f"torch.compiler.disable"
            )
    for node in list(graph.nodes):
        if node.op == "get_attr":
            parts.constants[node] = _constant(graph_module, node)
        elif node.target in _CHECKED_ALREADY:
            graph.erase_node(node)
    _part_from_tokens(parts)
    for node in graph.find_nodes(op="call_function", target=_PYTHON_OP):
        if node.meta["val"] and parts.tokens.keys() >= node.users.keys():
            with graph.inserting_before(node.next):
                force_computation(graph, node)
    return parts


def _part_from_tokens(parts: _Parts) -> None:
    """Replace the operators that call Functions by ones without a token, which is no tensor of the model."""
    for node in parts.graph.nodes:
        if node.target is DIFFERENTIABLE_PYTHON_OP:
            last = len(node.meta["val"]) - 1
            parts.tokens.update((user, None) for user in node.users if user.args[1] == last)
            node.target, node.meta["val"] = _PYTHON_OP, list(node.meta["val"])[:-1]
        elif node.target is PYTHON_OP_GRAD:
            token, *others = node.args
            if token in parts.tensors:
                parts.tokens[token] = parts.tensors[token]
            node.args = (None, *others)
    for node in parts.tokens:
        parts.tensors.pop(node, None)


def _put_in_place(node: torch.fx.Node, value: Any) -> None:
    """Replace an argument that is a number by its value in all nodes that read it."""
    for user in list(node.users):
        user.args = torch.fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = torch.fx.map_arg(user.kwargs, lambda n: value if n is node else n)
    node.graph.erase_node(node)


def _constant(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    value = operator.attrgetter(str(node.target))(graph_module)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(
            f"the graph has a subgraph ({node.target}, a {type(value).__name__}), as torch.cond and other "
            f"operators that take functions create, and a session runs none. Take the choice outside of the "
            f"compiled code"
        )
    if not isinstance(node.meta.get("val"), torch.Tensor):
        node.meta["val"] = private.fake_like(node.graph, value)
    return value.detach()


def _outputs(parts: _Parts, restrided: int) -> tuple[tuple[OutputSource, ...], tuple[torch.fx.Node, ...]]:
    """Return the graph's results, and the nodes that a session computes for them."""
    results = parts.graph.output_node().args[0]
    fetched: dict[torch.fx.Node, int] = {}
    outputs = []
    for i, result in enumerate(results):  # type: ignore[arg-type]
        if result is None:
            outputs.append(OutputSource())
        elif not isinstance(result, torch.fx.Node):
            outputs.append(OutputSource(number=_number(result)))
        elif result in parts.tokens:
            outputs.append(OutputSource(token=True))
        elif result in parts.tensors:
            outputs.append(OutputSource(argument=parts.tensors[result]))
        else:
            position = fetched.setdefault(result, len(fetched))
            strides = _strides(result.meta["val"]) if i < restrided else None
            outputs.append(OutputSource(fetched=position, strides=strides))
    return tuple(outputs), tuple(fetched)


def _number(value: Any) -> str:
    if isinstance(value, (int, torch.SymInt)):
        return written(value) if not isinstance(value, bool) else str(int(value))
    raise UnsupportedOperatorError(
        f"the graph returns {value}, a {type(value).__name__}, and the only numbers that are computed "
        f"outside of a session are integers. Return a tensor, or compute the number outside of the compiled "
        f"code"
    )


def _strides(value: torch.Tensor) -> tuple[str, ...] | None:
    """Return the strides of a tensor that is not contiguous; ``None`` for a contiguous one."""
    expected: Any = 1
    strides = value.stride()
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        if written(size) != "1" and written(stride) != written(expected):
            return tuple(map(written, strides))
        expected = expected * size
    return None


def _symbols_of_nodes(parts: _Parts) -> set[str]:
    """Return the symbols in the sizes among the nodes' arguments."""
    nodes = (n for n in parts.graph.nodes if n.op == "call_function")
    return {symbol for node in nodes for symbol in symbols_in((node.args, node.kwargs))}


def _sizes(parts: _Parts) -> dict[str, torch.SymInt]:
    """Map each symbol that is a size of an argument, or an argument, to that size."""
    found: dict[str, torch.SymInt] = {}
    for value in parts.numbers.values():
        for symbol in symbols_in(value):
            if written(value) == symbol:
                found.setdefault(symbol, value)
    for node in parts.tensors:
        for symbol, axis in carried(node.meta["val"]).items():
            found.setdefault(symbol, node.meta["val"].shape[axis])
    return found


def _sources(parts: _Parts, wanted: set[str]) -> dict[str, tuple[int, int | None]]:
    """Map each symbol to the argument of a call, and its dimension, that has its value."""
    found: dict[str, tuple[int, int | None]] = {}
    for position, value in parts.numbers.items():
        if isinstance(value, torch.SymInt):
            found.setdefault(written(value), (position, None))
    for node, position in parts.tensors.items():
        for symbol, axis in carried(node.meta["val"]).items():
            found.setdefault(symbol, (position, axis))
    missing = wanted - found.keys()
    if missing:
        _refuse_size(min(missing))
    return {symbol: found[symbol] for symbol in sorted(wanted)}


def _refuse_size(symbol: str) -> None:
    raise UnsupportedOperatorError(
        f"the graph has a size {symbol} that no argument has, which a session does not support. {_OUT}"
    )


def _names_in(texts: Sequence[str]) -> set[str]:
    return {symbol.name for text in texts for symbol in expressions.parse(text).free_symbols}


def _half(parts: _Parts, fetched: Sequence[torch.fx.Node], wanted: set[str]) -> tuple[Half, tuple[str, ...]]:
    """Return the graph of tensors, and the symbols that are dimensions of its additional input."""
    graph = torch.fx.Graph()
    values = {node: placeholder_of(graph, node) for node in parts.tensors}
    known = {symbol for node in parts.tensors for symbol in carried(node.meta["val"])}
    carrying = tuple(sorted(wanted - known))
    if carrying:
        _add_carrier(parts, graph, carrying)
    values.update((node, placeholder_of(graph, node)) for node in parts.constants)
    sizes = SizeNodes(graph)
    for node in parts.graph.nodes:
        if node.op == "call_function" and node not in parts.tokens:
            values[node] = copied_node(graph, node, sizes, values.__getitem__)
    graph.output(tuple(values[node] for node in fetched))
    inputs = (*parts.tensors, *parts.constants)
    half = Half(torch.fx.GraphModule(torch.nn.Module(), graph), inputs, tuple(fetched))
    half.graph_module.graph.eliminate_dead_code()
    return half, carrying


def _add_carrier(parts: _Parts, graph: torch.fx.Graph, symbols: Sequence[str]) -> None:
    """Add an input without elements, whose dimensions are some symbols."""
    sizes = _sizes(parts)
    for symbol in symbols:
        if symbol not in sizes:
            _refuse_size(symbol)
    shape: list[int | torch.SymInt] = [*(sizes[s] for s in symbols), 0]
    node = graph.placeholder("sizes")
    node.meta = {"val": private.empty_like(parts.graph, shape, torch.int64)}
