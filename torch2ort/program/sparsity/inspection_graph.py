"""The part of a program that computes, from the tensors of a call, the rows that the call needs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.program.alias_analysis import first_of, written_by
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.node_dependencies import ancestors
from torch2ort.program.sparsity.nodes import args_of, name_of, rank_of
from torch2ort.program.sparsity.row_axes import BATCH, KEYS, LENGTH, ROWS, Axes, same

if TYPE_CHECKING:
    from torch2ort.program.sparsity.row_values import Mask, RowValue

aten = torch.ops.aten
# Numbers that masks add to scores: to those that are not read, at least, and to those that are, at most.
_FAR, _NEAR = 9999.0, 2000.0


class InspectionGraph:
    """A graph of operators on the inputs of a program that carry no gradient.

    Args:
        program: the program's graph.
        constants: these inputs.

    Attributes:
        reads: nodes of shape (sequences, tokens), True in rows that results of the program depend on.
        attended: nodes of shape (sequences or 1, tokens or 1, tokens), True where the token of the second
            dimension attends to that of the third.
        valid_labels: nodes like those of ``reads``, True where a loss does not ignore the label.
    """

    def __init__(self, program: torch.fx.Graph, constants: Sequence[torch.fx.Node]) -> None:
        self._program = program
        self._constants = frozenset(constants)
        self._written = {first_of(target) for node in program.nodes for target in written_by(node)}
        self.graph = torch.fx.Graph()
        self.inputs = {
            node: self.graph.placeholder(node.name) for node in program.find_nodes(op="placeholder")
        }
        self._copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self._known: dict[torch.fx.Node, bool] = {}
        self._calls: dict[str, torch.fx.Node] = {}
        self.reads: dict[torch.fx.Node, None] = {}
        self.attended: dict[torch.fx.Node, None] = {}
        self.valid_labels: dict[torch.fx.Node, None] = {}

    def start(self, index: torch.fx.Node) -> None:
        """Define the number of sequences and of tokens, those of a tensor's first dimensions."""
        given = self.copy(index)
        shape = index.meta["val"].shape[:2]
        self.batch, self.length = (
            size if isinstance(size, int) else self.call(aten.sym_size.int, given, axis)
            for axis, size in enumerate(shape)
        )
        self._sizes = tuple(shape)
        self._device = index.meta["val"].device

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Return the node of a call; equal calls have one node."""
        key = str((target, args, sorted(kwargs.items())))
        if key not in self._calls:
            self._calls[key] = self.graph.call_function(target, args, kwargs)
        return self._calls[key]

    def can_compute(self, node: torch.fx.Node) -> bool:
        """Return True if a node depends on inputs without a gradient alone, and on no random number."""
        if node not in self._known:
            if node.op == "placeholder":
                self._known[node] = node in self._constants and node not in self._written
            else:
                self._known[node] = (
                    node.op == "call_function"
                    and (bool(name_of(node)) or not isinstance(node.target, OpOverload))
                    and not is_random(node)
                    and first_of(node) not in self._written
                    and all(map(self.can_compute, node.all_input_nodes))
                )
        return self._known[node]

    def copy(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the copy of a node of the program."""
        if node in self.inputs:
            return self.inputs[node]
        if node not in self._copies:
            for given in node.all_input_nodes:
                self.copy(given)
            if _is_and_of_bools(node):
                both = [self.copy(given) for given in args_of(node)]
                self._copies[node] = self.call(
                    aten.view.dtype, self._all([self._bytes(one) for one in both]), torch.bool
                )
            elif _is_copy(node):
                self._copies[node] = self.copy(args_of(node)[0])
            else:
                self._copies[node] = self.graph.node_copy(node, self.copy)
        return self._copies[node]

    def number(self, value: torch.fx.Node) -> float:
        """Return the number of a tensor that the program makes of a constant; infinity for others."""
        name = str(value.target)
        while name.startswith(("aten.lift_fresh", "aten.detach", "aten.to.", "aten.clone", "aten._to_copy")):
            value = value.all_input_nodes[0]
            name = str(value.target)
        if name in ("aten.full.default", "aten.scalar_tensor.default") and not value.all_input_nodes:
            return float(args_of(value)[-1])
        return math.inf

    def read(self, rows: torch.fx.Node) -> None:
        """Note rows that results depend on."""
        self.reads[rows] = None

    def union(self, rows: Sequence[torch.fx.Node]) -> torch.fx.Node:
        """Return the rows in one of several sets."""
        return functools.reduce(lambda one, other: self.call(aten.logical_or.default, one, other), rows)

    def _expand(self, mask: torch.fx.Node) -> torch.fx.Node:
        return self.call(aten.expand.default, mask, [self.batch, self.length])

    def rows_where(self, mask: torch.fx.Node, axes: Axes, *, zero: bool) -> torch.fx.Node | None:
        """Return the rows in which a mask has an element that is zero, or one that is not.

        Args:
            mask: an operand of an operator.
            axes: the dimensions of the operator's result.
            zero: True for the rows that have a zero.

        Returns:
            The rows; ``None`` if the mask is the same in all rows, or unknown.
        """
        value = mask.meta.get("val")
        if not isinstance(value, torch.Tensor) or not self.can_compute(mask):
            return None
        aligned = axes[len(axes) - value.dim() :]
        sizes = {label: size for label, size in zip(aligned, value.shape, strict=True) if label}
        if axes[:2] != (BATCH, LENGTH) and axes[:1] != (ROWS,):
            return None
        if all(same(size, 1) for size in sizes.values()):
            return None
        test = aten.eq.Scalar if zero else aten.ne.Scalar
        found = self.call(test, self.copy(mask), 0)
        if ROWS in sizes:
            found = self._flat(found, value.dim(), 1)
            return self.call(aten.reshape.default, found, [self.batch, self.length])
        leading = sum(label is not None for label in aligned)
        found = self._flat(found, value.dim(), leading)
        return self._expand(found)

    def _flat(self, mask: torch.fx.Node, rank: int, leading: int) -> torch.fx.Node:
        """Return True where a mask has a True in one of its dimensions after the leading ones."""
        for _ in range(rank - leading):
            mask = self.call(aten.any.dim, mask, -1)
        return mask

    def tokens(self, start: int, end: int) -> torch.fx.Node:
        """Return a range of each sequence's tokens.

        Args:
            start: the first one, counted from the end if it is negative.
            end: the one after the last, counted likewise.
        """
        numbers = self.call(aten.arange.default, self.length, device=self._device)
        after = self.call(aten.ge.Scalar, numbers, self._place(start))
        before = self.call(aten.lt.Scalar, numbers, self._place(end))
        return self._expand(self.call(aten.logical_and.default, after, before))

    def _place(self, index: int) -> Any:
        return index if index >= 0 else self.call(operator.add, self.length, index)

    def tokens_at(self, index: torch.fx.Node) -> torch.fx.Node:
        """Return the tokens with some indices, of each sequence."""
        none = self.call(aten.zeros.default, [self.length], dtype=torch.bool, device=self._device)
        found = self.call(aten.index_fill.int_Scalar, none, 0, self.copy(index), True)
        return self._expand(found)

    def rows_at(self, batch: torch.fx.Node, token: torch.fx.Node) -> torch.fx.Node:
        """Return the rows with some indices."""
        none = self.call(aten.zeros.default, [self.batch, self.length], dtype=torch.bool, device=self._device)
        one = self.call(aten.ones.default, [], dtype=torch.bool, device=self._device)
        return self.call(aten.index_put.default, none, [self.copy(batch), self.copy(token)], one)

    def labels(self, target: torch.fx.Node, ignored: int, value: RowValue) -> torch.fx.Node:
        """Return the rows whose label a loss does not ignore."""
        found = self.call(aten.ne.Scalar, self.copy(target), ignored)
        if value.is_sliced:
            found = self.call(aten.reshape.default, found, [self.batch, -1])
            found = self.call(aten.constant_pad_nd.default, found, self.padding(value, found), False)
        else:
            found = self.call(aten.reshape.default, found, [self.batch, self.length])
        self.valid_labels[found] = None
        return found

    def padding(self, value: RowValue, part: torch.fx.Node) -> list[Any]:
        """Return the numbers of tokens before and after a part of a sequence."""
        size = self.call(aten.sym_size.int, part, 1)
        rest = self.call(operator.sub, self.length, self.call(operator.add, size, value.start))
        return [value.start, rest]

    def attends(self, masks: Sequence[Mask], *, is_causal: bool) -> int | None:
        """Note the tokens that each token attends to.

        Returns:
            The position among :attr:`attended`; ``None`` if scores may depend on masks in another way, too.

        A token does not attend to another one that a mask drops, or whose score a mask lowers by 10000 or
        more, if another one's score is changed by 2000 at most: exp(-6000) is 0 in all dtypes. If there is no
        such token, it attends to all, as softmax depends on differences of scores alone.
        """
        kept: list[torch.fx.Node] = []
        is_known = True
        added: torch.fx.Node | None = None
        for mask in masks:
            part = self._align(mask)
            if part is None or mask.kind == "add":
                is_known = False
            if part is None:
                # One head may drop all keys, and then attends to all.
                kept, added = [], None
                break
            if mask.kind == "add":
                added = part if added is None else self.call(aten.add.Tensor, added, part)
            else:
                kept.append(part)
        if is_causal:
            ones = self.call(
                aten.ones.default, [self.length, self.length], dtype=torch.bool, device=self._device
            )
            kept.append(self.call(aten.unsqueeze.default, self._bytes(self.call(aten.tril.default, ones)), 0))
        if not kept:
            kept = [self.call(aten.ones.default, [1, 1, self.length], dtype=torch.uint8, device=self._device)]
        read = high = self._all(kept)
        if added is not None:
            far, raised = (self._bytes(self.call(aten.gt.Scalar, added, bound)) for bound in (-_FAR, _NEAR))
            above = self._bytes(self.call(aten.gt.Scalar, added, -_NEAR))
            # A number that is added to a dropped key may raise it again.
            read = self.call(aten.bitwise_or.Tensor, self._all([read, far]), raised)
            high = self._all([high, above, self.call(aten.bitwise_xor.Scalar, raised, 1)])
        some = self.call(aten.amax.default, high, [-1], True)
        none = self.call(aten.bitwise_xor.Scalar, some, 1)
        found = self.call(aten.bitwise_or.Tensor, read, none)
        self.attended[found] = None
        return list(self.attended).index(found) if is_known else None

    def _all(self, masks: Sequence[torch.fx.Node]) -> torch.fx.Node:
        """Return 1 where all masks are 1. Kernels on bytes are faster than those on booleans."""
        return functools.reduce(lambda one, other: self.call(aten.bitwise_and.Tensor, one, other), masks)

    def _bytes(self, mask: torch.fx.Node) -> torch.fx.Node:
        """Return a boolean tensor as bytes."""
        if mask.target is aten.view.dtype and mask.args[1] is torch.bool:
            return mask.all_input_nodes[0]
        return self.call(aten.view.dtype, mask, torch.uint8)

    def _align(self, mask: Mask) -> torch.fx.Node | None:
        """Return a mask of shape (sequences or 1, tokens or 1, tokens or 1), True where keys are kept.

        Returns:
            The node, with numbers for a mask that is added; ``None`` if it is too large to be inspected.
        """
        node = mask.node
        while node.target is aten.expand.default and rank_of(node) == rank_of(args_of(node)[0]):
            node = args_of(node)[0]
        value = node.meta["val"]
        aligned = mask.axes[len(mask.axes) - value.dim() :]
        for label, size in zip(aligned, value.shape, strict=True):
            if label is None and not same(size, 1):
                return None  # a mask for each head
        found = self.copy(node)
        if mask.kind != "add":
            if value.dtype is not torch.bool:
                found = self.call(aten.ne.Scalar, found, 0)
            found = self._bytes(found)
            if mask.kind == "drop":
                found = self.call(aten.bitwise_xor.Scalar, found, 1)
        order = [label for label in aligned if label in (BATCH, LENGTH, KEYS)]
        if order != [label for label in (BATCH, LENGTH, KEYS) if label in order]:
            return None
        for place in reversed([i for i, label in enumerate(aligned) if label is None]):
            found = self.call(aten.squeeze.dim, found, place)
        for place, label in enumerate((BATCH, LENGTH, KEYS)):
            if label not in order:
                found = self.call(aten.unsqueeze.default, found, place)
        return found

    def finish(self) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule, list[torch.fx.Node]]:
        """Return the computation in two parts.

        Returns:
            A function of the inputs that depends on their sizes alone, a function of the inputs and of the
            first one's results, and the inputs among the program's nodes.
        """
        results = [*self.reads, *self.attended, *self.valid_labels]
        of_values = set(self.inputs.values())
        for node in self.graph.nodes:
            is_size = node.target is aten.sym_size.int and args_of(node)[0].op == "placeholder"
            if not is_size and any(n in of_values for n in node.all_input_nodes):
                of_values.add(node)
        wanted = ancestors(results)
        first, second = torch.fx.Graph(), torch.fx.Graph()
        used = [node for node, copied in self.inputs.items() if copied in wanted]
        given = [
            {self.inputs[node]: graph.placeholder(node.name) for node in used} for graph in (first, second)
        ]
        nodes = [node for node in self.graph.nodes if node in wanted and node.op != "placeholder"]
        shared = [
            node
            for node in nodes
            if node not in of_values
            and (node in results or any(user in of_values and user in wanted for user in node.users))
        ]
        given[1].update({node: second.placeholder(f"sized_{i}") for i, node in enumerate(shared)})
        for node in nodes:
            graph, copies = (second, given[1]) if node in of_values else (first, given[0])
            copies.setdefault(node, graph.node_copy(node, copies.__getitem__))
        first.output(tuple(given[0][node] for node in shared))
        second.output(tuple(given[1][node] for node in results))
        modules = [torch.fx.GraphModule(torch.nn.Module(), graph) for graph in (first, second)]
        return modules[0], modules[1], used


def _is_copy(node: torch.fx.Node) -> bool:
    """Return True for a conversion to the type that a tensor has."""
    if name_of(node) not in ("to", "alias", "detach"):
        return False
    before, after = args_of(node)[0].meta["val"], node.meta["val"]
    return bool(before.dtype == after.dtype and before.device == after.device)


def _is_and_of_bools(node: torch.fx.Node) -> bool:
    return name_of(node) in ("__and__", "bitwise_and", "logical_and") and all(
        isinstance(n, torch.fx.Node) and n.meta["val"].dtype is torch.bool for n in args_of(node)
    )
