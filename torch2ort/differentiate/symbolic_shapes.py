"""Varying sizes in a joint graph and in its halves.

A joint graph does not compute sizes: a varying size is one of torch's symbolic numbers among the arguments of
its nodes. A half reads it from the shape of one of its inputs.
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
from torch2ort.program.keep_raising_ops import force_computation
from torch2ort.program.runtime_assertions import CONDITIONS, drop_conditions
from torch2ort.sizes import expressions
from torch2ort.sizes.symbols import expression_of, has_hint, is_number, raw_expression, size_hint
from torch2ort.sizes.unbacked_sizes import clear_deferred_asserts, deferred_asserts, unify_symbols
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_SIZE = aten.sym_size.int
# Their kernels check the sizes that they are called with, or accept any.
_LOOK_AT_SIZES = (aten.slice.Tensor, aten.split_with_sizes.default)


def settle_sizes(
    graph: torch.fx.Graph, *, way_out: str = "Call the model with sizes that do not vary"
) -> None:
    """Put each size of a joint graph as an expression where it is used, and remove its computation.

    Args:
        graph: the joint graph, or a half of it.
        way_out: advice for the message of the error.

    Raises:
        UnsupportedOperatorError: the graph computes with sizes in a way that a half cannot.
    """
    drop_conditions(graph)  # the exported graph has the conditions on inputs
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
    """Make forward compute each tensor whose size depends on values and is read: no other may have it.

    Args:
        graph: nodes of a program; changed in place.
    """
    sizes = graph.find_nodes(op="call_function", target=_SIZE)
    for tensor in dict.fromkeys(node.args[0] for node in sizes if not has_hint(node.meta["val"])):
        with graph.inserting_before(tensor.next):
            force_computation(graph, tensor)


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
    """Yield the symbols of the sizes in an argument of a node."""
    if isinstance(value, torch.SymInt):
        yield from sorted(str(symbol) for symbol in expression_of(value).free_symbols)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from symbols_in(item)
    elif isinstance(value, dict):
        yield from symbols_in(tuple(value.values()))


def carried(value: Any) -> dict[str, int]:
    """Map the symbols of the sizes that are dimensions of a tensor to these dimensions."""
    found: dict[str, int] = {}
    sizes: Sequence[int | torch.SymInt] = value.shape if isinstance(value, torch.Tensor) else ()
    for axis, size in enumerate(sizes):
        if not isinstance(size, int) and expression_of(size).is_Symbol:
            found.setdefault(str(expression_of(size)), axis)
    return found


def same_sizes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same sizes, for all values of those that vary."""
    return list(map(str, one.shape)) == list(map(str, other.shape))


def written(size: int | torch.SymInt) -> str:
    """Return a size as a text over symbols."""
    return expressions.text(size if isinstance(size, int) else _plain(size))


def _plain(size: torch.SymInt) -> sympy.Expr:
    return expressions.plain(expression_of(size), {})


def elements(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor had in the sample."""
    return math.prod(map(size_hint, tensor.shape))


def is_of_parts(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    """Return True if a size is computed from one that depends on values, as in ``4 + n``.

    Since torch 2.15 no input of a program may have such a size.
    """
    return not isinstance(size, int) and not expression_of(size).is_Symbol and not has_hint(size)


def nameless(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``value``, in which such sizes have names of their own."""
    sizes = [private.new_size(size) if is_of_parts(size) else size for size in value.shape]
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(sizes, dtype=value.dtype, device=value.device)


def sizes_of(nodes: Iterable[torch.fx.Node]) -> dict[str, torch.SymInt]:
    """Return the symbols of the sizes that are dimensions of the nodes' tensors, in their order."""
    sizes: dict[str, torch.SymInt] = {}
    for node in nodes:
        for symbol, axis in carried(node.meta.get("val")).items():
            sizes.setdefault(symbol, node.meta["val"].shape[axis])
    return sizes


class Replay(torch.fx.Interpreter):
    """An interpreter of a program, so a joint graph's nodes have the source lines of the model.

    Args:
        program: the program.

    Attributes:
        checked: assumptions of the trace that a run checks: conditions that the model sets, or that an
            operator's kernel checks.
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
        before = set(deferred_asserts(n.graph)) if n.target in (*_LOOK_AT_SIZES, *CONDITIONS) else None
        result = super().run_node(n)
        if before is not None:
            self.checked.update(set(deferred_asserts(n.graph)) - before)
        tensors = (leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self._runs[-1] += [raw_expression(size) for tensor in tensors for size in tensor.shape]
        return result

    def names(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """Map the symbols of sizes in earlier runs to those of the same sizes in the last run."""
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
    """Add checks of the trace's assumptions about sizes that are known only in a run.

    The trace runs forward more than once, and a size that depends on values has another name in each run. The
    gradients of outputs have the outputs' sizes.

    Args:
        graph: the joint graph.
        names: of sizes in earlier runs, mapped to those in the last run, whose nodes are in the graph.
        checked: assumptions that a run checks without further nodes.

    Returns:
        The assumptions that a run of forward checks, as texts of :func:`without_names`.

    Raises:
        UnsupportedOperatorError: the trace made an assumption that no run can check.
    """
    known = {condition.xreplace(names) for condition in checked}
    for condition in deferred_asserts(graph):
        found = condition.xreplace(names)
        if found not in known and not _holds(found):
            _check(graph, found)
            known.add(found)
    unify_symbols(graph, names)
    clear_deferred_asserts(graph)
    return frozenset(map(without_names, known))


def _check(graph: torch.fx.Graph, condition: sympy.Basic) -> None:
    """Make each run check that two sizes are equal.

    Raises:
        UnsupportedOperatorError: the condition is no equation, or has a size that no tensor of forward has.
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
    """Return the first tensor that was made with a size, and the dimension; ``None`` if no tensor has it."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for axis, found in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if raw_expression(found) == size:
                return node, axis
    return None


def _holds(condition: sympy.Basic) -> bool:
    """Return True if a condition holds for all sizes, which are never negative."""
    sizes = {symbol: expressions.symbol(symbol.name) for symbol in condition.free_symbols}
    return condition.xreplace(sizes) is sympy.true


def without_names(condition: sympy.Basic) -> str:
    """Return a condition as a text that does not depend on the names of its sizes."""
    ordered = sorted(condition.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
    # A symbol for each, integer as torch's own are: two sizes with one name are no condition.
    return str(condition.xreplace({s: sympy.Symbol(f"_{i}", integer=True) for i, s in enumerate(ordered)}))


def refuse_assumed_of_half(graph: torch.fx.Graph, *, is_forward: bool, checked: Collection[str] = ()) -> None:
    """Refuse assumptions of a half's translation about sizes that are known only in a run.

    A translation traces forward again, where each such size gets another name. That both names are one size
    is true.

    Args:
        graph: the joint graph.
        is_forward: whether it is the forward half.
        checked: assumptions that a run of it checks, as texts of :func:`without_names`.

    Raises:
        UnsupportedOperatorError: the translation made another assumption.
    """
    values = (node.meta.get("val") for node in graph.nodes)
    shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
    own = {str(symbol) for shape in shapes for size in shape for symbol in raw_expression(size).free_symbols}
    names: dict[str, str] = {}
    for condition in deferred_asserts(graph):
        symbols = sorted(map(str, condition.free_symbols), key=own.__contains__)
        is_name = isinstance(condition, sympy.Eq) and all(arg.is_Symbol for arg in condition.args)
        is_name = is_name and len(symbols) == 2 and symbols[0] not in own and symbols[1] in own
        if is_forward and without_names(condition) in checked:
            continue
        if not is_forward or not is_name or names.setdefault(*symbols) != symbols[1]:
            _refuse_condition("translation", condition)
    clear_deferred_asserts(graph)


def _refuse_condition(what: str, condition: sympy.Basic) -> NoReturn:
    raise UnsupportedOperatorError(
        f"the {what} of the model holds only if {condition}, of sizes that values in tensors decide, which "
        f"a training graph cannot check. Select with one mask what is to have one size, or put the part of "
        f"the model that takes them into a torch.autograd.Function"
    )


def carrier(symbols: Collection[str], inputs: Iterable[torch.fx.Node]) -> torch.fx.Node:
    """Return a node of no graph for a tensor without elements, whose dimensions are some symbols.

    Args:
        symbols: the symbols of the sizes.
        inputs: nodes of the joint graph.
    """
    found = sizes_of(inputs)
    like = next(iter(inputs)).meta["val"]
    made = torch.fx.Graph().placeholder("sizes")
    with like.fake_mode:
        shape = [size for symbol, size in found.items() if symbol in symbols]
        made.meta = {"val": torch.empty([*shape, 0], dtype=torch.int64, device=like.device)}
    return made


class SizeNodes:
    """Computation of sizes in a half.

    Args:
        graph: the half's graph, with its placeholders.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._known: dict[Any, torch.fx.Node] = {}

    def map_arguments(self, arguments: Any, nodes: Callable[[torch.fx.Node], torch.fx.Node | None]) -> Any:
        """Return the arguments of a node of the joint graph as arguments of one of the half.

        Args:
            arguments: the node's arguments.
            nodes: maps nodes of the joint graph to those of the half.
        """

        def one(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return nodes(value)
            return self.of(value) if isinstance(value, torch.SymInt) else value

        return torch.fx.node.map_aggregate(arguments, one)

    def of(self, size: int | torch.SymInt) -> int | torch.fx.Node:
        """Return the number, or the node that computes it."""
        if isinstance(size, int):
            return size
        wanted = _plain(size)
        if wanted.is_Integer:
            return int(wanted)
        if wanted not in self._known:
            symbols = [symbol.name for symbol in wanted.free_symbols]
            last = next(iter(reversed(self._graph.nodes)))
            # Functions of two numbers, as sym_max, accept only proxies of one tracer.
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
        """Compute the fake values of the nodes after ``behind``."""
        node = behind.next
        while node.op != "root":
            if "val" not in node.meta:
                args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)  # type: ignore[operator]
            node = node.next
