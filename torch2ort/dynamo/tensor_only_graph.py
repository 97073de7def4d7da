"""A graph of AOTAutograd's as one of tensors alone, which a session runs.

In the former a size that varies is a number like any other: an argument, an output, what nodes compute with.
Here each is read off the shape of a tensor where a node wants it; what is left of the numbers is computed
around the session.
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
from torch2ort.program.keep_raising_ops import have_computed
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.sizes import expressions

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
# What they check was known when the graph was traced.
_CHECKED_ALREADY = frozenset({aten._assert_tensor_metadata.default})
_OUT = "Compile with dynamic=False"


@dataclass(frozen=True)
class Output:
    """What one result of a graph is; one of the first four tells.

    Attributes:
        token: whether it is what ties the backward of Functions to their forward.
        fetched: position among the session's outputs.
        argument: position among the graph's arguments, if it is one of them.
        number: a number over symbols, as text; or ``None`` for nothing at all.
        strides: over symbols, where the tensor lies in memory in another way than in rows.
    """

    token: bool = False
    fetched: int | None = None
    argument: int | None = None
    number: str | None = None
    strides: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Interface:
    """What lies between the arguments of a graph and those of its session.

    Attributes:
        tensors: positions of the arguments that are fed.
        carried: symbols that are the dimensions of one more tensor without elements, fed behind those.
        constants: tensors of the graph's own, fed at the end.
        token: position of the argument that finds what Functions left in forward; ``None`` if none did.
        symbols: of each symbol that is wanted, the argument, and its dimension; ``None`` if it is a number.
        outputs: the graph's results.
        order: of the session's inputs among these, where it is another one.
    """

    tensors: tuple[int, ...]
    carried: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    token: int | None
    symbols: Mapping[str, tuple[int, int | None]]
    outputs: tuple[Output, ...]
    order: tuple[int, ...] = ()


@dataclass
class _Parts:
    """A copy of a graph, and what its ends are.

    Attributes:
        graph: sizes stand in it as symbolic numbers.
        tensors: placeholders of tensors -> their position among the arguments.
        numbers: positions of the other arguments -> their value in the trace.
        constants: nodes of the graph's own tensors -> these.
        tokens: nodes that tie the backward of Functions to their forward; arguments -> their position.
    """

    graph: torch.fx.Graph
    tensors: dict[torch.fx.Node, int] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)
    constants: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)
    tokens: dict[torch.fx.Node, int | None] = field(default_factory=dict)

    @property
    def token(self) -> int | None:
        """Position of the argument that is such a node; ``None`` if none is."""
        return next((position for position in self.tokens.values() if position is not None), None)


def tensors_only(
    graph_module: torch.fx.GraphModule, restrided: int, missing: frozenset[int] = frozenset()
) -> tuple[Half, Interface]:
    """A graph of tensors that computes what another one does.

    Args:
        graph_module: of AOTAutograd; it stays as it is.
        restrided: how many of the first results get the strides that they have in eager PyTorch.
        missing: positions of the arguments of a backward that are gradients which there are not.

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
    interface = Interface(
        tensors=tuple(parts.tensors.values()),
        carried=carrying,
        constants=tuple(parts.constants.values()),
        token=parts.token,
        symbols=_sources(parts, {*carrying, *_names_in(texts)}),
        outputs=outputs,
    )
    return half, interface


def _without(parts: _Parts, missing: frozenset[int]) -> tuple[Half, Interface]:
    """A backward in which some outputs have no gradient, as the joint engine makes it."""
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
    interface = Interface(
        tensors=tuple(parts.tensors[n] for n in fed),
        carried=carrying,
        constants=tuple(parts.constants[n] for n in constants),
        token=parts.token,
        symbols=_sources(parts, set(carrying)),
        outputs=tuple(
            Output(fetched=where[gradients[i]]) if i in gradients else Output() for i in range(len(results))
        ),
        order=tuple(given.index(n) for n in half.inputs),
    )
    return half, interface


def _tell_sizes(parts: _Parts) -> None:
    """Have a tensor in the graph whose dimensions are the sizes that no tensor but gradients tells.

    Raises:
        UnsupportedOperatorError: nothing tells a size that it computes with.
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
                f"sizes alone. Keep the code that hands it over out of the compiled code, with "
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
                have_computed(graph, node)
    return parts


def _part_from_tokens(parts: _Parts) -> None:
    """Have Functions called by operators without a token, which is no tensor of the model's."""
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
    """Put a number where the argument that it was is read."""
    for user in list(node.users):
        user.args = torch.fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = torch.fx.map_arg(user.kwargs, lambda n: value if n is node else n)
    node.graph.erase_node(node)


def _constant(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    value = operator.attrgetter(str(node.target))(graph_module)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(
            f"the graph has a part of its own ({node.target}, a {type(value).__name__}), as torch.cond and "
            f"other operators that take functions make, and a session runs none. Take the choice outside of "
            f"the compiled code"
        )
    if not isinstance(node.meta.get("val"), torch.Tensor):
        node.meta["val"] = private.fake_like(node.graph, value)
    return value.detach()


def _outputs(parts: _Parts, restrided: int) -> tuple[tuple[Output, ...], tuple[torch.fx.Node, ...]]:
    """The results, and the nodes that a session is to give for them."""
    results = parts.graph.output_node().args[0]
    fetched: dict[torch.fx.Node, int] = {}
    outputs = []
    for i, result in enumerate(results):  # type: ignore[arg-type]
        if result is None:
            outputs.append(Output())
        elif not isinstance(result, torch.fx.Node):
            outputs.append(Output(number=_number(result)))
        elif result in parts.tokens:
            outputs.append(Output(token=True))
        elif result in parts.tensors:
            outputs.append(Output(argument=parts.tensors[result]))
        else:
            position = fetched.setdefault(result, len(fetched))
            strides = _strides(result.meta["val"]) if i < restrided else None
            outputs.append(Output(fetched=position, strides=strides))
    return tuple(outputs), tuple(fetched)


def _number(value: Any) -> str:
    if isinstance(value, (int, torch.SymInt)):
        return written(value) if not isinstance(value, bool) else str(int(value))
    raise UnsupportedOperatorError(
        f"the graph returns {value}, a {type(value).__name__}, and around a session whole numbers alone are "
        f"computed. Return a tensor, or compute the number outside of the compiled code"
    )


def _strides(value: torch.Tensor) -> tuple[str, ...] | None:
    """The strides of a tensor that does not lie in rows; ``None`` for one that does."""
    expected: Any = 1
    strides = value.stride()
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        if written(size) != "1" and written(stride) != written(expected):
            return tuple(map(written, strides))
        expected = expected * size
    return None


def _symbols_of_nodes(parts: _Parts) -> set[str]:
    """The symbols of the sizes that nodes have among their arguments."""
    nodes = (n for n in parts.graph.nodes if n.op == "call_function")
    return {symbol for node in nodes for symbol in symbols_in((node.args, node.kwargs))}


def _sizes(parts: _Parts) -> dict[str, torch.SymInt]:
    """The size of each symbol that an argument tells."""
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
    """Where the value of each symbol is found in a call."""
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
        f"the graph has a size {symbol} that is that of no argument, which no session takes. {_OUT}"
    )


def _names_in(texts: Sequence[str]) -> set[str]:
    return {symbol.name for text in texts for symbol in expressions.parse(text).free_symbols}


def _half(parts: _Parts, fetched: Sequence[torch.fx.Node], wanted: set[str]) -> tuple[Half, tuple[str, ...]]:
    """The graph of tensors, and the symbols that one more input of it carries."""
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
