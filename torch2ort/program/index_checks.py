"""Arguments of operators that are indices, and the checks in front of them.

The checks are inserted before any decomposition: the operator that the model calls determines which indices
are refused, and with which error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.functions import encode_call
from torch2ort.kernels.index_check import BOUNDLESS, Check
from torch2ort.program import internal_ops
from torch2ort.program.integer_ranges import is_within
from torch2ort.program.kernel_sites import arguments_of
from torch2ort.sizes.symbols import size_hint
from torch2ort.support.provenance import origin_of, source_line

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Indexed:
    """An index among an operator's arguments.

    Attributes:
        index: the index tensor.
        source: the tensor that is indexed, or ``None``.
        dim: the dimension that is indexed; ``None`` for all elements.
        size: the size that the index must be below, where there is no source.
        low: the smallest number that is allowed; ``None`` for minus the size.
        ignored: another number that is allowed.
        exact: see :class:`Check`.
    """

    index: torch.fx.Node
    source: torch.fx.Node | None
    dim: int | None
    size: Any = None
    low: int | None = 0
    ignored: int | None = None
    exact: bool = False


_ALONG_DIM = frozenset(
    {
        "gather",
        "index_add",
        "index_copy",
        "index_reduce",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    }
)
_LOSSES = frozenset(
    {"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward"}
)
_INTEGERS = frozenset({torch.int32, torch.int64})


def check_indices(program: torch.export.ExportedProgram) -> None:
    """Insert a check in front of every index that may be out of range.

    Raises:
        UnsupportedOperatorError: the size that an index must be below is known only when the model runs.
    """
    for node in list(program.graph_module.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            unproven = unproven_indices(node, program)
            if unproven:
                _check(program.graph_module.graph, node, unproven)


def unproven_indices(node: torch.fx.Node, program: torch.export.ExportedProgram | None) -> list[Indexed]:
    """Return the indices among ``node``'s arguments that may be out of range.

    Args:
        node: a call of an operator.
        program: the program, with the values of constants; ``None`` if they are unknown.
    """
    return [found for found in _indexed(node) if not _is_proven(program, found)]


def add_check(graph: torch.fx.Graph, node: torch.fx.Node, found: Indexed) -> torch.fx.Node:
    """Add a check of one index of ``node``, beside it: it raises the error itself, and has no gradient.

    Args:
        graph: the graph, with the place where it inserts.
        node: the operator; it is unchanged.
        found: the index.

    Raises:
        UnsupportedOperatorError: the size that an index must be below is known only when the model runs.
    """
    text, tensors = _call(node)
    check = _described(node, replace(found, exact=True), text, tensors)
    given = [_stopped(graph, tensor) for tensor in tensors]
    return _made(graph, node, found, given, check)


def _indexed(node: torch.fx.Node) -> Iterator[Indexed]:
    """Yield the index tensors among ``node``'s arguments."""
    name, arguments = _name(node.target), arguments_of(node)
    if name in _ALONG_DIM or name == "index_fill":
        yield Indexed(
            arguments["index"],
            arguments["self"],
            arguments["dim"],
            low=None if name == "index_fill" else 0,
        )
    elif name == "embedding":
        yield Indexed(arguments["indices"], arguments["weight"], 0)
    elif name in ("take", "put"):
        yield Indexed(arguments["index"], arguments["self"], None, low=None)
    elif name in ("index", "index_put"):
        yield from _in_brackets(arguments["self"], arguments["indices"])
    elif name in _LOSSES:
        rank = arguments["self"].meta["val"].dim()
        yield Indexed(
            arguments["target"], arguments["self"], min(rank - 1, 1), ignored=arguments["ignore_index"]
        )
    elif name == "one_hot":
        yield Indexed(arguments["self"], None, None, arguments["num_classes"], exact=True)
    elif name == "bincount":
        yield Indexed(arguments["self"], None, None, BOUNDLESS)
    elif name == "repeat_interleave" and isinstance(arguments["repeats"], torch.fx.Node):
        if isinstance(arguments["repeats"].meta["val"], torch.Tensor):
            yield Indexed(arguments["repeats"], None, None, BOUNDLESS, exact=True)
    elif name == "multi_margin_loss":
        yield Indexed(arguments["target"], arguments["self"], -1)
    elif name == "multilabel_margin_loss":
        # -1 ends a list.
        yield Indexed(arguments["target"], arguments["self"], -1, low=-1, exact=True)
    elif name in ("max_unpool2d", "max_unpool3d"):
        yield Indexed(arguments["indices"], None, None, arguments["output_size"], exact=True)


def _name(target: Any) -> str:
    """Return the name of an operator, without its overload and without the underscore of in-place ones."""
    namespace, _, name = target._schema.name.partition("::")
    return name.removesuffix("_") if namespace == "aten" else ""


def _in_brackets(source: torch.fx.Node, indices: Sequence[torch.fx.Node | None]) -> Iterator[Indexed]:
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
            continue
        value = index.meta["val"]
        if value.dtype in (torch.bool, torch.uint8):
            dim += value.dim()
            continue
        yield Indexed(index, source, dim, low=None)
        dim += 1


def _check(graph: torch.fx.Graph, node: torch.fx.Node, unproven: Sequence[Indexed]) -> None:
    text, tensors = _call(node)
    checked: dict[torch.fx.Node, torch.fx.Node] = {}
    for found in unproven:
        check = _described(node, found, text, tensors)
        # One tensor may be used for several indices: each check reads the result of the one before.
        present = [checked.get(t, t) for t in tensors]
        with graph.inserting_before(node):
            checked[found.index] = _made(graph, node, found, present, check)
    for index_node, made in checked.items():
        node.replace_input_with(index_node, made)


def _described(node: torch.fx.Node, found: Indexed, text: str, tensors: Sequence[torch.fx.Node]) -> Check:
    return Check(
        call=text,
        index=tensors.index(found.index),
        source=None if found.source is None else tensors.index(found.source),
        dim=found.dim,
        size=_fixed_size(node, found) if found.source is None else None,
        low=found.low,
        ignored=found.ignored,
        exact=found.exact,
    )


def _made(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    found: Indexed,
    tensors: Sequence[torch.fx.Node],
    check: Check,
) -> torch.fx.Node:
    made = graph.call_function(internal_ops.checked_index, (tensors[check.index], tensors, check.to_json()))
    made.meta = origin_of(node)
    made.meta["val"] = found.index.meta["val"]
    return made


def _stopped(graph: torch.fx.Graph, tensor: torch.fx.Node) -> torch.fx.Node:
    if not tensor.meta["val"].is_floating_point():
        return tensor
    stopped = graph.call_function(aten.detach.default, (tensor,))
    stopped.meta = dict(tensor.meta)
    return stopped


def _fixed_size(node: torch.fx.Node, found: Indexed) -> int:
    sizes = found.size if isinstance(found.size, (list, tuple)) else [found.size]
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} gets indices that must be below a size that varies. "
            f"Export with that size fixed"
        )
    return math.prod(sizes)


def _is_proven(program: torch.export.ExportedProgram | None, found: Indexed) -> bool:
    if found.index.meta["val"].dtype not in _INTEGERS:
        # Probabilities of classes, or bytes, which each operator interprets itself.
        return True
    size = found.size
    if found.source is not None:
        value = found.source.meta["val"]
        if value.dim() == 0:
            # A 0-d tensor has one element, and no kernel reads outside of it.
            return True
        size = value.numel() if found.dim is None else value.shape[found.dim]
    if not isinstance(size, (int, torch.SymInt)):
        return False
    return is_within(program, found.index, -size if found.low is None else found.low, size)


def _call(node: torch.fx.Node) -> tuple[str, list[torch.fx.Node]]:
    """Return the text of eager's call, which raises eager's error, and its tensors."""
    tensors: list[torch.fx.Node] = []

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if not isinstance(value.meta["val"], torch.Tensor):
                return size_hint(value.meta["val"])
            if value not in tensors:
                tensors.append(value)
            return {"tensor": tensors.index(value)}
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        return value

    target = _without_writing(node.target)
    arguments = [convert(a) for a in node.args]
    keywords = {name: convert(a) for name, a in node.kwargs.items()}
    return encode_call(target, arguments, keywords, random=False), tensors


def _without_writing(target: Any) -> OpOverload:
    """Return the operator that returns a new tensor instead of writing in place."""
    name, overload = target._schema.name.removeprefix("aten::"), target._schema.overload_name or "default"
    found: OpOverload = getattr(getattr(aten, name.removesuffix("_")), overload)
    return found if name.endswith("_") else target
