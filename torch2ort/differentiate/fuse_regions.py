"""Fused regions of a half: operators between products, convolutions and Functions become one call each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.aliasing import VIEWS
from torch2ort.differentiate.canonical_sizes import CanonicalSizes
from torch2ort.differentiate.fusible_ops import MADE, POINTWISE, is_fusible, name_of
from torch2ort.differentiate.recompute import SMALLEST, is_large
from torch2ort.differentiate.symbolic_shapes import elements
from torch2ort.fusion.region import encode_region
from torch2ort.fusion.region_function import FusedRegion
from torch2ort.kernels.functions import encode_call
from torch2ort.program.kernel_sites import SiteMaker, is_random
from torch2ort.pythonop import Site
from torch2ort.sizes.symbols import is_number

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
# A tensor that is so many times smaller than the result computed from it costs nothing to read.
_SMALL = 8
# Operators that PyTorch computes in one kernel, which is as fast as compiled code where tensors are large.
_KERNELS = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "gelu",
        "gelu_backward", "native_layer_norm", "native_layer_norm_backward",
    }
)  # fmt: skip
# The most terms of one result's expression: torch's inductor writes each term out where it is read.
_MOST_TERMS = 4096


def fuse(graph: torch.fx.Graph, available: Callable[[Sequence[str]], Collection[str]]) -> list[Site]:
    """Replace regions of operators without a product, convolution or Function between them by calls.

    Args:
        graph: the graph of a half, functional; changed in place.
        available: returns those of some regions' texts that can run as one kernel each.

    Returns:
        The sites of the regions, which the caller must keep alive.
    """
    _merge(graph)
    kept = [node for node in graph.nodes if _is_ordered(node)]
    maker = SiteMaker(graph)
    found = map(_region_of, _regions(graph))
    regions = [region for region in found if region is not None and region.outputs]
    usable = available([region.text for region in regions if _inputs_of(region.nodes)])
    for region in regions:
        if region.text in usable:
            _replace(region, maker)
    _sort(graph, kept)
    graph.lint()
    return maker.sites


def _merge(graph: torch.fx.Graph) -> None:
    """Keep one of several nodes that compute the same, which compiled code would all write out."""
    known: dict[str, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if is_fusible(node):
            same = known.setdefault(repr((node.target, node.args, node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_number(node: torch.fx.Node) -> bool:
    """Return True if a node computes a number, which depends only on sizes."""
    return is_number(node.meta.get("val"))


def _is_ordered(node: torch.fx.Node) -> bool:
    """Return True if a node's order must be kept: it calls a Function, or draws random numbers."""
    if node.op != "call_function" or node.target is operator.getitem or _is_number(node):
        return False
    return not (isinstance(node.target, OpOverload) and node.target.namespace == "aten") or is_random(node)


def _levels(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Return a number for each node that can be in a region: connected nodes of one number make a region.

    The number counts the nodes before it that are part of no region. A value that leaves a region is read
    again only by a region of a higher number, so no region waits for itself. A node gets the highest number
    that its consumers allow: it is computed late, beside them.
    """
    reached: dict[torch.fx.Node, int] = {}
    last = 0
    for node in graph.nodes:
        level = max((reached[n] for n in node.all_input_nodes), default=0)
        # A number that is computed from sizes depends only on the tensors that have the sizes.
        if node.op == "call_function" and not is_fusible(node) and not _is_number(node):
            level += 1
            if _is_ordered(node):
                level = last = max(level, last + 1)
        reached[node] = level
    levels: dict[torch.fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if is_fusible(node):
            readers = [user for user in node.users if user.op == "call_function"]
            allowed = [_allowed(user, levels, reached) for user in readers]
            is_result = len(readers) < len(node.users)
            levels[node] = min([*allowed, *([reached[node]] if is_result or not readers else [])])
    for node in levels:
        source = _source(node)
        if source is not None:
            levels[node] = levels[source]
    return levels


def _allowed(
    reader: torch.fx.Node, levels: dict[torch.fx.Node, int], reached: dict[torch.fx.Node, int]
) -> int:
    """Return the highest number that a node may have for one of its consumers."""
    if reader in levels:
        return levels[reader]
    return reached[reader] if _is_number(reader) else reached[reader] - 1


def _compute_again(graph: torch.fx.Graph, levels: dict[torch.fx.Node, int]) -> None:
    """Make a region compute a value that it would read of another one, where that adds no reading.

    An activation that backward recomputes is read by a product first and by its derivative later: otherwise
    each step of it would be written out in between.

    Args:
        graph: changed in place.
        levels: numbers of its nodes; those of the new nodes are added.
    """
    leaves: dict[torch.fx.Node, frozenset[torch.fx.Node] | None] = {}
    for node in graph.nodes:
        if node in levels:
            leaves[node] = _leaves(node, levels, leaves)
    for node in reversed(list(leaves)):
        if leaves[node] is None or not is_large(node):
            continue
        copies: dict[int, torch.fx.Node] = {}
        for user in list(node.users):
            level = levels.get(user, 0)
            if level > levels[node]:
                if level not in copies:
                    with graph.inserting_after(node):
                        copies[level] = graph.node_copy(node)
                    levels[copies[level]] = level
                user.replace_input_with(node, copies[level])
        if copies and not node.users:
            graph.erase_node(node)
            del levels[node]


def _leaves(
    node: torch.fx.Node,
    levels: dict[torch.fx.Node, int],
    known: dict[torch.fx.Node, frozenset[torch.fx.Node] | None],
) -> frozenset[torch.fx.Node] | None:
    """Return the large tensors, at most one, that a node is a pointwise result of; ``None`` for several."""
    if name_of(node) not in POINTWISE and node.target not in VIEWS and name_of(node) not in MADE:
        return None
    size = elements(node.meta["val"])
    found: set[torch.fx.Node] = set()
    for read in node.all_input_nodes:
        if _is_number(read):
            continue
        if levels.get(read) != levels[node]:
            found.update([read] if elements(read.meta["val"]) * _SMALL > size else [])
            continue
        inner = known[read]
        if inner is None:
            return None
        found |= inner
    return frozenset(found) if len(found) <= 1 else None


def _source(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node of which a node is one result; ``None`` if it is none."""
    return cast(torch.fx.Node, node.args[0]) if node.target is operator.getitem else None


def _regions(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Return connected nodes of one number, in the order of the graph, without those that gain nothing."""
    levels = _levels(graph)
    _compute_again(graph, levels)
    region_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node not in levels:
            continue
        merged = [node]
        for read in node.all_input_nodes:
            if levels.get(read) == levels[node] and region_of[read] is not merged:
                merged = region_of[read] + merged
                for member in merged:
                    region_of[member] = merged
        region_of[node] = merged
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = {id(nodes): sorted(nodes, key=order.__getitem__) for nodes in region_of.values()}
    return [part for nodes in found.values() for part in _parts(nodes)]


def _parts(nodes: Sequence[torch.fx.Node]) -> Iterator[list[torch.fx.Node]]:
    """Yield the parts of a region that is too large for a compiler, without views at their ends."""
    terms: dict[torch.fx.Node, int] = {}
    parts: dict[torch.fx.Node, int] = {}
    for node in nodes:
        source = _source(node)
        if source is not None:
            parts[node], terms[node] = parts[source], terms[source]
            continue
        read = [n for n in _operands(node) if n in parts]
        part = max((parts[n] for n in read), default=0)
        count = 1 + sum(terms[n] for n in read if parts[n] == part)
        parts[node], terms[node] = (part + 1, 1) if count > _MOST_TERMS else (part, count)
    for number in sorted(set(parts.values())):
        part_of_it = _without_views_at_the_end([n for n in nodes if parts[n] == number])
        if sum(map(_gains, part_of_it)) > 1:
            yield part_of_it


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the operands of a node, with repetitions."""
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _without_views_at_the_end(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    # Onnxruntime fuses a transposition into the product that reads it.
    left = dict.fromkeys(nodes)
    for node in reversed(nodes):
        if (node.target in VIEWS or name_of(node) in MADE) and left.keys().isdisjoint(node.users):
            del left[node]
    return list(left)


def _gains(node: torch.fx.Node) -> bool:
    """Return True if a node saves a pass over memory, or a call, as a part of a region."""
    if not _computes(node):
        return False
    value = node.meta["val"]
    result = value if isinstance(value, torch.Tensor) else value[0]
    is_one_kernel = name_of(node) in _KERNELS and result is not None
    return not (is_one_kernel and elements(result) * result.element_size() >= SMALLEST)


def _computes(node: torch.fx.Node) -> bool:
    return node.target not in VIEWS and node.target is not operator.getitem and name_of(node) not in MADE


@dataclass(frozen=True)
class _Region:
    """Nodes that are replaced by one call.

    Attributes:
        nodes: in the order of the graph.
        outputs: those that other nodes read.
        sizes: names for their varying sizes.
        text: the text of the region.
    """

    nodes: Sequence[torch.fx.Node]
    outputs: Sequence[torch.fx.Node]
    sizes: CanonicalSizes
    text: str


def _region_of(nodes: Sequence[torch.fx.Node]) -> _Region | None:
    """Return the region of nodes; ``None`` where a text cannot contain a size."""
    inside = set(nodes)
    outputs = [n for n in nodes if not inside.issuperset(n.users) and isinstance(n.meta["val"], torch.Tensor)]
    inputs = _inputs_of(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if _is_number(n))
    try:
        sizes = CanonicalSizes([n.meta["val"] for n in inputs], list(read))
        return _Region(nodes, outputs, sizes, _text_of(nodes, inputs, sizes, outputs))
    except ValueError:
        return None


def _inputs_of(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the tensors that nodes read of other nodes."""
    inside = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    return [n for n in read if not _is_number(n)]


def _replace(region: _Region, maker: SiteMaker) -> None:
    """Replace a region by a call."""
    # The call of an earlier region may have replaced their operands.
    inputs, last = _inputs_of(region.nodes), region.nodes[-1]
    if region.sizes.extra_sizes:
        inputs.append(maker.of_sizes(last, region.sizes.extra_sizes))
    results = maker.call(last, FusedRegion, [region.text], inputs)
    for node, result in zip(region.outputs, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(region.nodes):
        node.graph.erase_node(node)


def _text_of(
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    sizes: CanonicalSizes,
    outputs: Sequence[torch.fx.Node],
) -> str:
    """Return the text of a region, which is equal for all regions that compute the same.

    Raises:
        ValueError: a text cannot contain a size.
    """
    given = [(n.meta["val"].dtype, [sizes.of(size) for size in n.meta["val"].shape]) for n in inputs]
    if sizes.extra_sizes:
        given.append((torch.int64, [*(sizes.of(n.meta["val"]) for n in sizes.extra_sizes), 0]))
    numbers = {node: i for i, node in enumerate(inputs)}
    count = len(given)
    calls = []
    for node in nodes:
        if _source(node) is not None:
            continue
        call, tensors, taken = _call_of(node)
        calls.append((call, [numbers[n] for n in tensors], [sizes.of(n.meta["val"]) for n in taken]))
        if isinstance(node.meta["val"], torch.Tensor):
            numbers[node] = count
            count += 1
        else:
            numbers.update((user, count + cast(int, user.args[1])) for user in node.users)
            count += len(node.meta["val"])
    return encode_region(given, calls, [numbers[n] for n in outputs])


def _call_of(node: torch.fx.Node) -> tuple[str, list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the text of a node's call, and its tensors and sizes in the order of their numbers in it."""
    tensors: list[torch.fx.Node] = []
    sizes: list[torch.fx.Node] = []

    def operand(value: torch.fx.Node) -> Any:
        kind, known = ("size", sizes) if _is_number(value) else ("tensor", tensors)
        if value not in known:
            known.append(value)
        return {kind: known.index(value)}

    # In a graph a tensor is contiguous, so a reshape never needs a copy; in eager PyTorch, a view may fail.
    target = cast(OpOverload, aten.reshape.default if node.target in _RESHAPES else node.target)
    arguments = cast("tuple[Any, ...]", torch.fx.node.map_arg(node.args, operand))
    keywords = cast("dict[str, Any]", torch.fx.node.map_arg(node.kwargs, operand))
    return encode_call(target, arguments, dict(keywords), random=False), tensors, sizes


def _sort(graph: torch.fx.Graph, kept: Sequence[torch.fx.Node]) -> None:
    """Put nodes after their operands, otherwise in the same order; those of ``kept`` keep their order."""
    placed: set[torch.fx.Node] = set()
    ordered: list[torch.fx.Node] = []
    before = dict(zip(kept[1:], kept, strict=False))
    for node in graph.nodes:
        stack = [node]
        while stack:
            top = stack[-1]
            needed = [*top.all_input_nodes, *([before[top]] if top in before else [])]
            missing = [n for n in needed if n not in placed]
            stack.extend(missing)
            if not missing:
                stack.pop()
                if top not in placed:
                    placed.add(top)
                    ordered.append(top)
    for earlier, later in itertools.pairwise(ordered):
        earlier.append(later)
