"""A program that computes the rows that are needed alone, as packed tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.internal_ops import fill_rows, put_rows, take_rows
from torch2ort.program.sparsity.dependence import (
    Need,
    Rows,
    argument,
    is_pointwise,
    name_of,
    schema_of,
    shape_of,
)
from torch2ort.program.sparsity.inspection_graph import args_of, rank_of
from torch2ort.program.sparsity.row_axes import BATCH, LENGTH, is_packable, num_leading, same
from torch2ort.program.strides import lies_in_order
from torch2ort.sizes.symbols import has_hint

aten = torch.ops.aten
# Operators that keep the form of their argument: they cost little, or move elements that are packed later.
_FOLLOWING = frozenset(
    {
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "unsqueeze"),
        *("squeeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack"),
        *("to", "_to_copy", "type_as", "contiguous", "alias", "detach", "clone", "expand"),
    }
)
_PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul"})
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
# Positions of arguments that are dimensions.
_BY_ROW = frozenset(
    {
        *(
            "layer_norm",
            "rms_norm",
            "softmax",
            "_softmax",
            "log_softmax",
            "dropout",
            "gather",
            "embedding",
            "glu",
        ),
        *("sum", "mean", "amax", "amin", "var", "std", "linalg_vector_norm", "norm", "argmax"),
    }
)


@dataclass(frozen=True)
class RowSet:
    """A set of rows in a packed program, described by inputs whose names begin with its own.

    Their ends are ``_rows``, the indices ``sequence * tokens + token`` in rising order, ``_batch`` and
    ``_length``, sequence and token of each row; ``_inverse``, of shape (sequences, tokens), the position of a
    row in the set, and that of any other for the rest; and ``_within``, the positions of the rows in the
    larger set.
    """

    name: str


READ, ATTENDED = RowSet("read"), RowSet("attended")


class Packing:
    """Rewriting of one program.

    Args:
        graph: the program; it is changed.
        rows: its analysis.
        sets: the set of rows that the values of each need are computed for; values of a need without a set
            are computed in all rows.
        inputs: the additional inputs of the program, by their names.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        rows: Rows,
        sets: dict[Need, RowSet],
        inputs: Mapping[str, torch.fx.Node],
    ) -> None:
        self._graph, self._rows, self._sets, self._inputs = graph, rows, sets, inputs
        self._packed: dict[torch.fx.Node, tuple[Any, RowSet]] = {}
        self._made: dict[Any, torch.fx.Node] = {}
        self._place: torch.fx.Node = graph.output_node()

    # --- the choice

    def _is_packed(self, node: torch.fx.Node) -> bool:
        value, need = self._rows.values.get(node), self._rows.need.get(node)
        if value is None or need not in self._sets or node.op == "placeholder":
            return False
        is_masked_loss = name_of(node) in _LOSSES
        if not is_packable(value.axes) or any(label for label in value.axes[num_leading(value.axes) :]):
            return False
        if node.target is operator.getitem:
            return args_of(node)[0] in self._packed
        with_rows = [n for n in node.all_input_nodes if n in self._rows.values]
        name = name_of(node)
        if name in _FOLLOWING:
            return all(n in self._packed for n in with_rows)
        if not all(self._can_pack(n) for n in with_rows):
            return False
        if name == "dropout" and not lies_in_order(args_of(node)[0].meta["val"]):
            return False
        if value.is_sliced and not all(n in self._packed for n in with_rows):
            return False
        return is_masked_loss or name in _PRODUCTS | _BY_ROW or is_pointwise(node)

    def _can_pack(self, node: torch.fx.Node) -> bool:
        value = self._rows.values[node]
        return is_packable(value.axes) and not any(value.axes[num_leading(value.axes) :])

    # --- the rewriting

    def run(self) -> int:
        """Rewrite the program.

        Returns:
            The number of nodes that are packed.
        """
        for node in list(self._graph.nodes):
            if node.op not in ("call_function", "output"):
                continue
            self._place = node
            if self._is_packed(node):
                need = self._rows.need[node]
                self._packed[node] = self._pack(node, self._sets[need]), self._sets[need]
            elif not self._pack_terminal(node):
                self._unpack_arguments(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self._packed and not node.users:
                self._graph.erase_node(node)
        return len(self._packed)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return insert_call(self._place, target, *args, **kwargs)

    def _once(self, key: Any, make: Callable[[], torch.fx.Node]) -> torch.fx.Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _input(self, rows: RowSet, kind: str) -> torch.fx.Node:
        return self._inputs[f"{rows.name}_{kind}"]

    def _size(self, rows: RowSet, axis: int) -> Any:
        """Return the number of sequences or of tokens, as an argument of a node."""
        size = self._rows.sizes[axis]
        if isinstance(size, int):
            return size
        inverse = self._input(rows, "inverse")

        def make() -> torch.fx.Node:
            with self._graph.inserting_after(inverse):
                made = self._graph.call_function(aten.sym_size.int, (inverse, axis))
            made.meta = {"val": inverse.meta["val"].shape[axis]}
            return made

        return self._once(("size", rows, axis), make)

    def _num_rows(self, rows: RowSet) -> Any:
        """Return the number of all rows, as an argument of a node."""
        batch, length = self._size(rows, 0), self._size(rows, 1)
        if isinstance(batch, int) and isinstance(length, int):
            return batch * length
        return self._call(operator.mul, batch, length)

    def _trailing(self, node: torch.fx.Node, leading: int, given: Sequence[Any] = ()) -> list[Any]:
        """Return the sizes of a tensor after its dimensions of rows, as arguments of a node."""
        found: list[Any] = []
        for i, size in enumerate(shape_of(node)):
            if i < leading:
                continue
            if isinstance(size, int):
                found.append(size)
            elif i < len(given) and isinstance(given[i], torch.fx.Node):
                found.append(given[i])
            else:
                raise UnsupportedOperatorError(f"{node} has a varying size besides those of its rows")
        return found

    # --- between packed and other tensors

    def _take(self, node: torch.fx.Node, rows: RowSet) -> torch.fx.Node:
        """Return a tensor with rows, packed."""
        if node in self._packed:
            packed, have = self._packed[node]
            if have == rows:
                return cast(torch.fx.Node, packed)
            within = self._input(rows, "within")
            return self._once((node, rows), lambda: self._call(take_rows, packed, within))
        return self._once(
            (node, rows), lambda: self._take_dense(node, num_leading(self._rows.values[node].axes), rows)
        )

    def _take_dense(self, node: torch.fx.Node, leading: int, rows: RowSet) -> torch.fx.Node:
        flat = node if leading == 1 else self._call(aten.flatten.using_ints, node, 0, 1)
        return self._call(take_rows, flat, self._input(rows, "rows"))

    def _operand(self, operand: torch.fx.Node, node: torch.fx.Node, rows: RowSet) -> torch.fx.Node:
        """Return an operand of an operator on each element, for the rows of a set."""
        if operand in self._rows.values:
            leading = num_leading(self._rows.values[node].axes)
            return self._with_rank(self._take(operand, rows), operand, node, leading)
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            return operand
        axes = self._rows.values[node].axes
        more = rank_of(node) - rank_of(operand)
        sizes = [shape_of(operand)[i - more] if i >= more else 1 for i in range(num_leading(axes))]
        has = [not same(size, 1) for size in sizes]
        given = num_leading(axes) - more
        if axes[0] != BATCH:
            return (
                self._once((operand, rows), lambda: self._take_dense(operand, 1, rows)) if has[0] else operand
            )
        if all(has):
            return self._once((operand, rows), lambda: self._take_dense(operand, 2, rows))
        if not any(has):
            return self._call(aten.flatten.using_ints, operand, 0, 1) if given == 2 else operand
        # The rows of one sequence, or one row of each.
        kind = "length" if has[1] else "batch"

        def make() -> torch.fx.Node:
            table = operand
            if given == 2:
                table = self._call(aten.squeeze.dim, operand, 0 if has[1] else 1)
            index = self._input(rows, kind)
            value = table.meta["val"]
            if value.dim() == 2 and value.dtype.is_floating_point:
                return self._call(aten.embedding.default, table, index)
            return self._call(aten.index_select.default, table, 0, index)

        return self._once((operand, rows, kind), make)

    def _with_rank(
        self, packed: torch.fx.Node, operand: torch.fx.Node, node: torch.fx.Node, leading: int
    ) -> torch.fx.Node:
        """Return a packed operand with the dimensions that broadcasting to the result's rank adds."""
        if rank_of(operand) != rank_of(node):
            raise UnsupportedOperatorError(f"{node} broadcasts rows")
        return packed

    def _unpack(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return a packed tensor with all rows, those that are not needed with any content."""
        packed, rows = self._packed[node]
        value = self._rows.values[node]

        def make() -> torch.fx.Node:
            inverse = self._input(rows, "inverse")
            given = self._input(rows, "rows")
            if name_of(node) in _LOSSES:
                # The loss of an ignored label is zero.
                full = self._call(put_rows, packed, given, self._num_rows(rows))
            else:
                flat = self._once(("flat", rows), lambda: self._flat_inverse(inverse))
                full = self._call(fill_rows, packed, flat, given)
            if value.axes[0] != BATCH:
                return full
            sizes = [self._size(rows, 0), self._size(rows, 1), *self._trailing_of(packed)]
            return self._call(aten.view.default, full, sizes)

        if value.is_sliced:
            raise UnsupportedOperatorError(f"{node} is a part of packed sequences")
        return self._once((node, "full"), make)

    def _flat_inverse(self, inverse: torch.fx.Node) -> torch.fx.Node:
        with self._graph.inserting_after(inverse):
            place = inverse.next
        saved, self._place = self._place, place
        try:
            return self._call(aten.view.default, inverse, [-1])
        finally:
            self._place = saved

    def _trailing_of(self, packed: torch.fx.Node) -> list[Any]:
        return self._trailing(packed, 1)

    def _unpack_arguments(self, node: torch.fx.Node) -> None:
        """Make an operator that is not packed read tensors with all rows."""
        if name_of(node) == "sym_size":
            given = args_of(node)[0]
            if given in self._packed:
                self._replace_size(node, given)
            return
        for given in dict.fromkeys(node.all_input_nodes):
            if given in self._packed:
                node.replace_input_with(given, self._unpack(given))

    def _replace_size(self, node: torch.fx.Node, given: torch.fx.Node) -> None:
        axes, axis = self._rows.values[given].axes, args_of(node)[1]
        _, rows = self._packed[given]
        if axes[axis] in (BATCH, LENGTH):
            node.args = (self._input(rows, "inverse"), 0 if axes[axis] == BATCH else 1)
        else:
            node.replace_input_with(given, self._unpack(given))

    # --- operators

    def _pack(self, node: torch.fx.Node, rows: RowSet) -> Any:
        name = name_of(node)
        leading = num_leading(self._rows.values[node].axes)
        if node.target is operator.getitem:
            packed, _ = self._packed[args_of(node)[0]]
            return self._call(operator.getitem, packed, args_of(node)[1])
        if name == "embedding":
            weight, index, *others = args_of(node)
            taken = self._once((index, rows), lambda: self._take_dense(index, rank_of(index), rows))
            return self._call(node.target, weight, taken, *others, **node.kwargs)
        if name in _LOSSES:
            return self._loss(node, rows)
        if self._rows.values[node].is_sliced and name == "slice":
            # The loss ignores the labels of the other rows.
            return self._take(args_of(node)[0], rows)
        if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten"):
            source = self._take(args_of(node)[0], rows)
            given = args_of(node)[1] if name in ("view", "reshape", "_unsafe_view") else ()
            return self._call(aten.reshape.default, source, [-1, *self._trailing(node, leading, given)])
        if name == "dropout":
            return self._dropout(node, rows)
        if is_pointwise(node) or name in ("type_as",):
            mapped = {n: self._operand(n, node, rows) for n in node.all_input_nodes}
            return self._call_same(node, mapped)
        mapped = {n: self._take(n, rows) for n in node.all_input_nodes if n in self._rows.values}
        if name == "gather":
            mapped[args_of(node)[2]] = self._take_dense(args_of(node)[2], leading, rows)
        return self._call_same(node, mapped, fewer=leading - 1)

    def _call_same(
        self, node: torch.fx.Node, mapped: dict[torch.fx.Node, torch.fx.Node], fewer: int = 0
    ) -> Any:
        """Return a call of the same operator on packed tensors, which have fewer dimensions."""
        args, kwargs = cast(Any, torch.fx.map_arg((node.args, node.kwargs), lambda n: mapped.get(n, n)))
        if fewer:
            args, kwargs = self._shift(node, list(args), dict(kwargs), fewer)
        return self._call(node.target, *args, **kwargs)

    def _shift(
        self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any], fewer: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """Subtract from dimensions the number of those that packed tensors lack."""
        parameters = schema_of(node).arguments
        counted = rank_of(node) if name_of(node) in ("unsqueeze", "stack") else _rank_of_first(node)

        def moved(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [moved(item) for item in value]
            return value if value is None or value < 0 else value - fewer

        for i, parameter in enumerate(parameters):
            if parameter.name in ("dim", "dims", "dim0", "dim1"):
                if i < len(args):
                    args[i] = moved(_positive(args[i], counted))
                elif parameter.name in kwargs:
                    kwargs[parameter.name] = moved(_positive(kwargs[parameter.name], counted))
            elif parameter.name == "size" and name_of(node) == "expand":
                args[i] = [-1, *args[i][fewer + 1 :]]
        if name_of(node) == "permute":
            args[1] = [0, *(d for d in args[1] if d > 0)]
        return args, kwargs

    def _dropout(self, node: torch.fx.Node, rows: RowSet) -> Any:
        """Return dropout with the random numbers that all rows draw, of which some are used."""
        source, p, trained = args_of(node)
        packed = self._take(source, rows)
        if not trained or p == 0:
            return packed
        value = source.meta["val"]
        leading = num_leading(self._rows.values[node].axes)
        first = [self._num_rows(rows)] if leading == 1 else [self._size(rows, 0), self._size(rows, 1)]
        sizes = [*first, *self._trailing(source, leading)]
        ones = self._call(aten.ones.default, sizes, dtype=value.dtype, device=value.device)
        noise = self._call(aten.dropout.default, ones, p, True)
        return self._call(aten.mul.Tensor, packed, self._take_dense(noise, leading, rows))

    def _loss(self, node: torch.fx.Node, rows: RowSet) -> Any:
        """Return a loss of packed logits and the labels of their rows."""
        logits, target, *others = args_of(node)
        value = self._rows.values[logits]
        labels: torch.fx.Node = target
        if value.is_sliced:
            ignored = argument(node, "ignore_index")
            labels = self._call(aten.reshape.default, labels, [self._size(rows, 0), -1])
            part = labels.meta["val"].shape[1]
            after = self._rows.sizes[1] - value.start - part
            if not isinstance(after, int):
                if not has_hint(after) or not after.node.expr.is_number:
                    raise UnsupportedOperatorError(f"{node} reads a part of varying size")
                after = int(after)
            labels = self._call(aten.constant_pad_nd.default, labels, [value.start, after], ignored)
        if rank_of(labels) > 1:
            labels = self._call(aten.flatten.using_ints, labels, 0, -1)
        taken = self._call(take_rows, labels, self._input(rows, "rows"))
        return self._call(node.target, self._take(logits, rows), taken, *others, **node.kwargs)

    def _pack_terminal(self, node: torch.fx.Node) -> bool:
        """Make an operator that reads some rows read them from packed tensors; return False for others."""
        source: Any = args_of(node)[0] if node.args else None
        if node not in self._rows.terminals or (source not in self._packed and name_of(node) not in _LOSSES):
            return False
        name = name_of(node)
        if name in _LOSSES:
            rows = self._sets.get(Need.READ)
            if rows is None or not self._can_pack_loss(source):
                return False
            node.replace_all_uses_with(self._loss(node, rows))
        else:
            packed, rows = self._packed[source]
            inverse = self._input(rows, "inverse")
            if name == "index":
                index = self._call(aten.index.Tensor, inverse, args_of(node)[1])
            else:
                index = self._call(node.target, inverse, 1, *args_of(node)[2:])
            node.replace_all_uses_with(self._call(aten.index.Tensor, packed, [index]))
        self._graph.erase_node(node)
        return True

    def _can_pack_loss(self, logits: Any) -> bool:
        value = self._rows.values.get(logits)
        if value is None or not self._can_pack(logits):
            return False
        return logits in self._packed or not value.is_sliced


def _positive(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_positive(d, rank) for d in dim]
    return dim if dim is None else dim % rank


def _rank_of_first(node: torch.fx.Node) -> int:
    first = args_of(node)[0]
    if isinstance(first, (list, tuple)):
        first = next(n for n in first if rank_of(n) > 1 or len(first) == 1)
    return rank_of(first)
