"""Sizes that vary, in a joint graph and in its halves.

A joint graph computes no size: one that varies stands as torch's own symbolic number among the arguments of
its nodes. A half takes it from the shape of a tensor that it is given.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import optree
import sympy
import torch

from torch2ort._torch import aot as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.internal_ops import must_compute, python_number
from torch2ort.program.keep_raising_ops import have_computed
from torch2ort.program.runtime_assertions import CONDITIONS, drop_conditions
from torch2ort.sizes import expressions
from torch2ort.sizes.symbols import expression_of, has_hint, is_number, raw_expression, size_hint
from torch2ort.sizes.unbacked_sizes import assumed, forget_assumed, take_for_one
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_SIZE = aten.sym_size.int
# What runs them refuses sizes that do not fit, and knows no other way with them, or takes any.
_LOOK_AT_SIZES = (aten.slice.Tensor, aten.split_with_sizes.default)


def settle_sizes(
    graph: torch.fx.Graph, *, way_out: str = "Call the model with sizes that do not vary"
) -> None:
    """Put each size of a joint graph where it is read, and drop what computed it.

    Args:
        graph: the joint graph, or a half of it.
        way_out: what to do where that is refused.

    Raises:
        UnsupportedOperatorError: it computes with sizes in a way that a half cannot.
    """
    drop_conditions(graph)  # the exported graph has those that hold for inputs
    computed = dict.fromkeys(
        n for n in graph.nodes if n.op == "call_function" and is_number(n.meta.get("val"))
    )

    def settled(node: torch.fx.Node) -> Any:
        return _settled(node, way_out) if node in computed else node

    for node in graph.nodes:
        if computed and node not in computed:
            node.args = torch.fx.map_arg(node.args, settled)
            node.kwargs = torch.fx.map_arg(node.kwargs, settled)
    for node in reversed(computed):
        graph.erase_node(node)


def keep_sizes(graph: torch.fx.Graph) -> None:
    """Have each tensor computed that nodes read a size of which values decide: no other one may have it.

    Args:
        graph: of a program; changed in place.
    """
    sizes = graph.find_nodes(op="call_function", target=_SIZE)
    for tensor in dict.fromkeys(node.args[0] for node in sizes if not has_hint(node.meta["val"])):
        with graph.inserting_before(tensor.next):
            have_computed(graph, tensor)


def _settled(node: torch.fx.Node, way_out: str) -> int | torch.SymInt:
    value = node.meta["val"]
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):
        try:
            _plain(value)
        except ValueError:
            pass
        else:
            return value
    raise UnsupportedOperatorError(
        f"{node.target} at {source_line(node)} computes {value} of sizes that vary, which a training "
        f"graph does not take. {way_out}"
    )


def symbols_in(value: Any) -> Iterator[str]:
    """The symbols of the sizes in an argument of a node."""
    if isinstance(value, torch.SymInt):
        yield from sorted(str(symbol) for symbol in expression_of(value).free_symbols)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from symbols_in(item)
    elif isinstance(value, dict):
        yield from symbols_in(tuple(value.values()))


def carried(value: Any) -> dict[str, int]:
    """Symbols of the sizes that are dimensions of a tensor -> the dimension."""
    found: dict[str, int] = {}
    sizes: Sequence[int | torch.SymInt] = value.shape if isinstance(value, torch.Tensor) else ()
    for axis, size in enumerate(sizes):
        if not isinstance(size, int) and expression_of(size).is_Symbol:
            found.setdefault(str(expression_of(size)), axis)
    return found


def same_sizes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes, whatever those are that vary."""
    return list(map(str, one.shape)) == list(map(str, other.shape))


def written(size: int | torch.SymInt) -> str:
    """A size as a text over symbols."""
    return expressions.text(size if isinstance(size, int) else _plain(size))


def _plain(size: torch.SymInt) -> sympy.Expr:
    return expressions.plain(expression_of(size), {})


def elements(tensor: torch.Tensor) -> int:
    """How many elements a tensor had in the sample."""
    return math.prod(map(size_hint, tensor.shape))


def is_of_parts(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    """Whether a size is computed of one that values decide, as in ``4 + n``.

    Since torch 2.15 no input of a program may be of such a size.
    """
    return not isinstance(size, int) and not expression_of(size).is_Symbol and not has_hint(size)


def nameless(value: torch.Tensor) -> torch.Tensor:
    """A tensor like one with such sizes, which have names of their own here."""
    sizes = [private.new_size(size) if is_of_parts(size) else size for size in value.shape]
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(sizes, dtype=value.dtype, device=value.device)


def sizes_of(nodes: Iterable[torch.fx.Node]) -> dict[str, torch.SymInt]:
    """The symbols of the sizes that are dimensions of what nodes give, in their order."""
    sizes: dict[str, torch.SymInt] = {}
    for node in nodes:
        for symbol, axis in carried(node.meta.get("val")).items():
            sizes.setdefault(symbol, node.meta["val"].shape[axis])
    return sizes


class Replay(torch.fx.Interpreter):
    """Runs a program node by node, so that a joint graph's nodes come from the same lines of the model.

    Args:
        program: the program.

    Attributes:
        checked: what the trace took for granted that a run checks: conditions that the model sets, or that an
            operator's own kernel looks at.
    """

    def __init__(self, program: torch.fx.GraphModule) -> None:
        super().__init__(program)
        self.checked: set[sympy.Basic] = set()
        self._runs: list[list[sympy.Expr]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        self._runs.append([])
        return super().run(*args, **kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node."""
        before = set(assumed(n.graph)) if n.target in (*_LOOK_AT_SIZES, *CONDITIONS) else None
        result = super().run_node(n)
        if before is not None:
            self.checked.update(set(assumed(n.graph)) - before)
        tensors = (leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self._runs[-1] += [raw_expression(size) for tensor in tensors for size in tensor.shape]
        return result

    def names(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """The symbols of sizes in runs but the last, and those of the same sizes in the last."""
        *earlier, last = self._runs
        return {
            size: same
            for run in earlier
            for size, same in zip(run, last, strict=True)
            if size.is_Symbol and same.is_Symbol and size != same
        }


def check_assumed(
    graph: torch.fx.Graph, names: Mapping[sympy.Symbol, sympy.Symbol], checked: Collection[sympy.Basic]
) -> frozenset[str]:
    """Have a run check what the trace took sizes for that only a run tells.

    The trace runs forward more than once, and a size that values decide has another name in each run. The
    gradients of outputs have the outputs' sizes.

    Args:
        graph: the joint graph.
        names: of sizes in earlier runs, and those in the last, whose nodes are in the graph.
        checked: what a run checks by itself.

    Returns:
        What a run of forward checks, as of :func:`without_names`.

    Raises:
        UnsupportedOperatorError: it took for granted what no run checks.
    """
    known = {condition.xreplace(names) for condition in checked}
    for condition in assumed(graph):
        found = condition.xreplace(names)
        if found not in known and not _holds(found):
            _check(graph, found)
            known.add(found)
    take_for_one(graph, names)
    forget_assumed(graph)
    return frozenset(map(without_names, known))


def _check(graph: torch.fx.Graph, condition: sympy.Basic) -> None:
    """Have each run check that two sizes are one.

    Raises:
        UnsupportedOperatorError: the condition is another one, or of sizes that no tensor of forward has.
    """
    carriers: dict[torch.fx.Node, int] = {}

    def written(size: sympy.Basic) -> Any:
        if size.is_Integer:
            return int(size)
        if size.is_Symbol:
            node, axis = _carrier_of(graph, size) or _refuse_condition("backward", condition)
            return {"size": [carriers.setdefault(node, len(carriers)), axis]}
        name = {sympy.Add: "operator.add", sympy.Mul: "operator.mul"}.get(type(size))
        if name is None:
            _refuse_condition("backward", condition)
        return functools.reduce(lambda one, other: [name, one, other], map(written, size.args))

    if not isinstance(condition, sympy.Eq):
        _refuse_condition("backward", condition)
    formula = ["same_size", written(condition.lhs), written(condition.rhs)]
    place = next(node for node in reversed(graph.nodes) if node in carriers).next
    holds = insert_call(place, python_number, list(carriers), torch.bool, json.dumps(formula))
    insert_call(place, must_compute, holds)


def _carrier_of(graph: torch.fx.Graph, size: sympy.Basic) -> tuple[torch.fx.Node, int] | None:
    """What first has a size, as it was made, and along which dimension; ``None`` if no tensor has it."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for axis, found in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if raw_expression(found) == size:
                return node, axis
    return None


def _holds(condition: sympy.Basic) -> bool:
    """Whether a condition holds for any sizes, which are never below 0."""
    sizes = {symbol: expressions.symbol(symbol.name) for symbol in condition.free_symbols}
    return condition.xreplace(sizes) is sympy.true


def without_names(condition: sympy.Basic) -> str:
    """A condition as a text that is the same whatever its sizes are called."""
    ordered = sorted(condition.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
    # Another one for each, as torch's own are integers: two sizes that are one name are no condition.
    return str(condition.xreplace({s: sympy.Symbol(f"_{i}", integer=True) for i, s in enumerate(ordered)}))


def refuse_assumed_of_half(graph: torch.fx.Graph, *, is_forward: bool, checked: Collection[str] = ()) -> None:
    """Refuse what the translation of a half took sizes for that only a run tells.

    A translation traces forward anew, where each of these sizes gets another name; that both are one is true.

    Args:
        graph: the joint graph.
        is_forward: whether it is the forward half.
        checked: what a run of it checks, with no names.

    Raises:
        UnsupportedOperatorError: it took one for another.
    """
    values = (node.meta.get("val") for node in graph.nodes)
    shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
    own = {str(symbol) for shape in shapes for size in shape for symbol in raw_expression(size).free_symbols}
    names: dict[str, str] = {}
    for condition in assumed(graph):
        symbols = sorted(map(str, condition.free_symbols), key=own.__contains__)
        is_name = isinstance(condition, sympy.Eq) and all(arg.is_Symbol for arg in condition.args)
        is_name = is_name and len(symbols) == 2 and symbols[0] not in own and symbols[1] in own
        if is_forward and without_names(condition) in checked:
            continue
        if not is_forward or not is_name or names.setdefault(*symbols) != symbols[1]:
            _refuse_condition("translation", condition)
    forget_assumed(graph)


def _refuse_condition(what: str, condition: sympy.Basic) -> NoReturn:
    raise UnsupportedOperatorError(
        f"the {what} of the model holds only if {condition}, of sizes that values in tensors decide, which "
        f"a training graph cannot check. Select with one mask what is to have one size, or put the part of "
        f"the model that takes them into a torch.autograd.Function"
    )


def carrier(symbols: Collection[str], inputs: Iterable[torch.fx.Node]) -> torch.fx.Node:
    """A node of no graph that stands for a tensor without elements, whose dimensions are some symbols.

    Args:
        symbols: of the sizes.
        inputs: of the joint graph.
    """
    found = sizes_of(inputs)
    like = next(iter(inputs)).meta["val"]
    made = torch.fx.Graph().placeholder("sizes")
    with like.fake_mode:
        shape = [size for symbol, size in found.items() if symbol in symbols]
        made.meta = {"val": torch.empty([*shape, 0], dtype=torch.int64, device=like.device)}
    return made


class SizeNodes:
    """Computes sizes in a half.

    Args:
        graph: its nodes; the placeholders are there.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._known: dict[Any, torch.fx.Node] = {}

    def mapped(self, arguments: Any, nodes: Callable[[torch.fx.Node], torch.fx.Node | None]) -> Any:
        """Arguments of a joint graph's node as those of a half's.

        Args:
            arguments: of the node.
            nodes: from the joint graph's nodes to the half's.
        """

        def one(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return nodes(value)
            return self.of(value) if isinstance(value, torch.SymInt) else value

        return torch.fx.node.map_aggregate(arguments, one)

    def of(self, size: int | torch.SymInt) -> int | torch.fx.Node:
        """The number, or the node that computes it."""
        if isinstance(size, int):
            return size
        wanted = _plain(size)
        if wanted.is_Integer:
            return int(wanted)
        if wanted not in self._known:
            symbols = [symbol.name for symbol in wanted.free_symbols]
            last = next(iter(reversed(self._graph.nodes)))
            # Functions of two numbers, as sym_max, take proxies of one tracer alone.
            tracer = torch.fx.proxy.GraphAppendingTracer(self._graph)
            values = {name: torch.fx.Proxy(self._symbol(name), tracer) for name in symbols}
            self._known[wanted] = expressions.evaluate(wanted, values).node
            self._note_values(last)
        return self._known[wanted]

    def _symbol(self, name: str) -> torch.fx.Node:
        key = expressions.symbol(name)
        if key not in self._known:
            found = ((node, carried(node.meta["val"]).get(name)) for node in self._graph.nodes)
            node, axis = next(((node, axis) for node, axis in found if axis is not None), (None, None))
            if node is None:
                raise UnsupportedOperatorError(
                    f"a size {name} that values in tensors decide is that of no tensor of the graph, which "
                    f"a training graph does not take. Put the part of the model that reads it into a "
                    f"torch.autograd.Function"
                )
            made = self._known[key] = self._graph.call_function(_SIZE, (node, axis))
            made.meta = {"val": node.meta["val"].shape[axis]}
        return self._known[key]

    def _note_values(self, behind: torch.fx.Node) -> None:
        """Note what the nodes behind one give."""
        node = behind.next
        while node.op != "root":
            if "val" not in node.meta:
                args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)  # type: ignore[operator]
            node = node.next
