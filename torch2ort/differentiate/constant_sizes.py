"""Constant folding of values that sizes depend on.

The sizes of ``x[mask]`` and ``torch.bincount(labels)`` depend on values. Where those values are computed from
constants of the program, the sizes are equal in each step, and everything computed from them is a constant,
too.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.differentiate.assigned_buffers import to_memory
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.traced_program import Constant, TracedProgram
from torch2ort.sizes.symbols import has_hint
from torch2ort.sizes.unbacked_sizes import conditions, forget_new_sizes

aten = torch.ops.aten
_SITES = torch.ops.torch2ort.python_op.default


def fold_constants(source: TracedProgram) -> TracedProgram:
    """Return ``source``, or a copy in which sizes that depend on constants are numbers.

    Args:
        source: the traced program.
    """
    # Regions without gradient are submodules.
    regions = (m for m in source.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
    if not any(_is_decided_by_values(node) for region in regions for node in region.graph.nodes):
        return source
    program = copy.deepcopy(source.graph_module)
    return _Folding(program, source).run()


def _is_decided_by_values(node: torch.fx.Node) -> bool:
    """Return True if ``node`` computes a tensor with a size, or a number, that is known only in a run."""
    found = node.meta.get("val")
    for value in found if isinstance(found, (list, tuple)) else (found,):
        numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(number, torch.SymInt) and not has_hint(number) for number in numbers):
            return True
    return False


class _Folding:
    """Folding of one program, changed in place."""

    def __init__(self, program: torch.fx.GraphModule, source: TracedProgram) -> None:
        self._program, self._source = program, source
        self._graph = program.graph
        self._inputs = self._graph.find_nodes(op="placeholder")
        self._feeds = list(source.feeds)
        # All tensors of torch.export's program have one fake mode.
        values = [node.meta["val"] for node in self._inputs]
        self._mode = next((v.fake_mode for v in values if isinstance(v, private.FakeTensor)), None)
        self._written = {base for node in self._graph.nodes for base in map(_base, _written_by(node))}
        self._known: dict[torch.fx.Node, Any] = {
            node: feed.value
            for node, feed in zip(self._inputs, source.feeds, strict=True)
            if isinstance(feed, Constant) and not feed.owner and node not in self._written
        }
        # Nodes that are unused from the start are kept: they may raise an error.
        self._unread = {node for node in self._graph.nodes if node.op == "call_function" and not node.users}
        # Nodes that depend on a new constant, whose fake values are to be computed again.
        self._behind: set[torch.fx.Node] = set()

    def run(self) -> TracedProgram:
        """Return the program with its new constants."""
        if self._mode is None:
            return self._source
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is aten.index.Tensor:
                self._count_mask(node)
            elif node.target is aten.repeat_interleave.self_Tensor:
                self._count_repeats(node)
            decided = _is_decided_by_values(node)
            if decided and self._fold(node):
                continue
            if not self._behind.isdisjoint(node.all_input_nodes) or node in self._behind:
                self._find_again(node)
        self._graph.eliminate_dead_code(lambda node: node.op != "call_function" or self._has_effects(node))
        forget_new_sizes(self._graph)
        # Recomputed nodes may have added conditions on sizes that are constants now.
        known = max(self._source.conditions, conditions(self._graph))
        return replace(self._source, graph_module=self._program, feeds=tuple(self._feeds), conditions=known)

    def _has_effects(self, node: torch.fx.Node) -> bool:
        return (
            node in self._unread
            or node.is_impure()
            or node.target is _SITES
            or is_random(node)
            or any(_written_by(node))
        )

    def _fold(self, node: torch.fx.Node) -> bool:
        """Replace ``node`` by its value if it is constant; return True if it is."""
        value = self._value(node)
        if isinstance(value, torch.Tensor):
            node.replace_all_uses_with(self._constant(node, value))
        elif isinstance(value, (bool, int)):
            self._behind.update(node.users)
            _put_number(node, value)
        else:
            return False
        self._graph.erase_node(node)
        return True

    def _count_mask(self, node: torch.fx.Node) -> None:
        """Replace constant masks by the positions of the elements that they select."""
        tensor, indices = node.args
        found: list[Any] = []
        for index in indices:  # type: ignore[union-attr]
            mask = self._value(index) if isinstance(index, torch.fx.Node) else None
            if mask is None or mask.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                found += [self._constant(node, positions) for positions in mask.nonzero(as_tuple=True)]
        if found != list(indices):  # type: ignore[arg-type]
            node.args = (tensor, found)
            self._behind.add(node)

    def _count_repeats(self, node: torch.fx.Node) -> None:
        """Set the output size of ``repeat_interleave`` where the repeats are constant."""
        repeats = self._value(node.args[1])
        if repeats is not None:
            node.kwargs = {**node.kwargs, "output_size": int(repeats.sum())}
            self._behind.add(node)

    def _constant(self, origin: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
        """Add a placeholder for a constant of this program, and return it."""
        with self._graph.inserting_after(self._inputs[-1]):
            node = self._graph.placeholder(f"folded_{len(self._inputs)}")
        assert self._mode is not None
        node.meta = {
            "val": private.fake_constant(self._mode, value.clone()),
            "stack_trace": origin.stack_trace,
        }
        self._inputs.append(node)
        self._feeds.append(Constant(value.clone()))
        self._known[node] = value
        self._behind.add(node)
        return node

    def _value(self, node: Any) -> Any:
        """Return the value of a node that is equal in every run; ``None`` if it is not known."""
        if not isinstance(node, torch.fx.Node):
            return None
        order = list(_ancestors(node, self._known))
        if not all(n in self._known or self._is_repeatable(n) for n in order):
            return None
        with torch.no_grad():
            for n in order:
                if n not in self._known:
                    args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), self._known.__getitem__)
                    self._known[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]

    def _is_repeatable(self, node: torch.fx.Node) -> bool:
        if node.op != "call_function" or node.target is aten.empty.memory_format:
            return False
        if node.target is operator.getitem or getattr(node.target, "__module__", "") == "_operator":
            return True
        known = isinstance(node.target, private.OpOverload) and node.target.namespace == "aten"
        return (
            known and not is_random(node) and _base(node) not in self._written and not any(_written_by(node))
        )

    def _find_again(self, node: torch.fx.Node) -> None:
        """Compute the fake value of a node that depends on a new constant again."""
        if "_assert" in str(node.target) or "sym_constrain" in str(node.target):
            # The condition is on a number that is constant now. Where it is False, eager PyTorch raises.
            if not node.all_input_nodes and node.args[0] is not False:
                self._graph.erase_node(node)
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert self._mode is not None
        with self._mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        self._behind.add(node)
        if isinstance(node.meta["val"], (bool, int)):
            self._behind.update(node.users)
            _put_number(node, node.meta["val"])
            self._graph.erase_node(node)


def _written_by(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    # The detach_ that torch.export adds to each constant changes no values.
    return () if node.target is aten.detach_.default else written_by(node)


def _put_number(node: torch.fx.Node, number: float) -> None:
    """Replace all uses of ``node`` by a number."""
    replaced: Callable[[torch.fx.Node], Any] = lambda n: number if n is node else n  # noqa: E731
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, replaced)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, replaced)


def _ancestors(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> Sequence[torch.fx.Node]:
    """Return ``node`` and all nodes that it is computed from, operands first, up to known ones."""
    found: dict[torch.fx.Node, None] = {}
    stack = [(node, iter(() if node in known else node.all_input_nodes))]
    while stack:
        current, left = stack[-1]
        following = next((n for n in left if n not in found), None)
        if following is None:
            found[current] = None
            stack.pop()
        else:
            stack.append((following, iter(() if following in known else following.all_input_nodes)))
    return list(found)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that allocated the memory of ``node``."""
    return list(to_memory(node))[-1]
