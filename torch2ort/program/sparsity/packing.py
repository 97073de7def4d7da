"""A program that computes the rows that are needed alone, as packed tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.internal_ops import fill_rows, packed_attention, put_rows, take_rows
from torch2ort.program.sparsity.inspection import CAUSAL, FULL
from torch2ort.program.sparsity.nodes import (
    ATTENTION,
    LOSSES,
    PRODUCTS,
    REDUCTIONS,
    VIEWS,
    args_of,
    argument,
    is_pointwise,
    name_of,
    rank_of,
    schema_of,
    shape_of,
)
from torch2ort.program.sparsity.row_axes import (
    BATCH,
    LENGTH,
    ROWS,
    Axes,
    dims_of_rows,
    is_packable,
    other_dims,
    same,
)
from torch2ort.program.sparsity.row_values import Need, Rows
from torch2ort.program.strides import lies_in_order
from torch2ort.sizes.symbols import has_hint, size_hint

aten = torch.ops.aten
# Operators that keep the form of their argument: they cost little, or move elements that are packed later.
_FOLLOWING = VIEWS | {
    *("transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes"),
    *("chunk", "unbind", "cat", "stack", "to", "_to_copy", "type_as", "contiguous", "alias", "detach"),
    *("clone", "expand"),
}
# Products of padding in a sequence's attention from which on a call of the kernel for each sequence takes
# less time than a call for all of them.
_FEWEST_PRODUCTS = 1 << 20
# Operators that compute each row from the same row, by arguments that count dimensions.
_BY_ROW = REDUCTIONS | {
    *("layer_norm", "rms_norm", "softmax", "_softmax", "log_softmax", "dropout", "gather", "embedding", "glu")
}


@dataclass(frozen=True)
class RowSet:
    """A set of rows in a packed program, described by inputs whose names begin with its own.

    Their ends are ``_rows``, the indices ``sequence * tokens + token`` in rising order, ``_batch`` and
    ``_length``, sequence and token of each row; ``_ends``, for each sequence the number of rows up to its
    end; ``_inverse``, of shape (sequences, tokens), the position of a row in the set, and that of any other
    for the rest; and ``_within``, the positions of the rows in the larger set.
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
        kinds: for each mask of attention, its kind; see :meth:`Needed.kinds`.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        rows: Rows,
        sets: dict[Need, RowSet],
        inputs: Mapping[str, torch.fx.Node],
        kinds: Sequence[str],
    ) -> None:
        self._graph, self._rows, self._sets, self._inputs = graph, rows, sets, inputs
        self._kinds = kinds
        self._packed: dict[torch.fx.Node, tuple[Any, RowSet]] = {}
        self._made: dict[Any, torch.fx.Node] = {}
        self._place: torch.fx.Node = graph.output_node()

    # --- the choice

    def _is_packed(self, node: torch.fx.Node) -> bool:
        if node.target is operator.getitem:
            return args_of(node)[0] in self._packed
        value, need = self._rows.values.get(node), self._rows.need.get(node)
        if value is None or need not in self._sets or node.op == "placeholder":
            return False
        if not is_packable(value.axes):
            return False
        with_rows = [n for n in node.all_input_nodes if n in self._rows.values]
        name = name_of(node)
        if name in _FOLLOWING:
            return all(n in self._packed for n in with_rows)
        if not all(is_packable(self._rows.values[n].axes) for n in with_rows):
            return False
        if name == ATTENTION:
            return self._packs_attention(node)
        if name == "dropout" and not lies_in_order(args_of(node)[0].meta["val"]):
            return False
        if value.is_sliced and not all(n in self._packed for n in with_rows):
            return False
        return name in LOSSES | PRODUCTS | _BY_ROW or is_pointwise(node)

    def _packs_attention(self, node: torch.fx.Node) -> bool:
        """Return True for attention that a kernel computes for each sequence alone, as fast."""
        if node not in self._rows.attention or Need.ATTENDED not in self._sets or rank_of(node) != 4:
            return False
        kind = self._kinds[self._rows.attention[node]]
        query, key, value = args_of(node)[:3]
        if not kind or argument(node, "dropout_p") or key not in self._rows.values:
            return False
        if query.meta["val"].device.type != "cpu":
            return False
        _, heads, length, size = shape_of(query)
        is_square = all(same(shape_of(t)[1], heads) and same(shape_of(t)[3], size) for t in (key, value))
        rows = size_hint(shape_of(self._input(ATTENDED, "rows"))[0])
        density = rows / math.prod(map(size_hint, self._rows.sizes))
        products = math.prod(map(size_hint, (heads, length, length, size)))
        if not is_square or products * (1 - density**2) < _FEWEST_PRODUCTS:
            return False
        return kind == FULL or self._sets[self._rows.need[node]] == self._sets[Need.ATTENDED]

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
                rows = self._set_of(node)
                self._packed[node] = self._pack(node, rows), rows
            elif not self._pack_terminal(node):
                self._unpack_arguments(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self._packed and not node.users:
                self._graph.erase_node(node)
        return len(self._packed)

    def _set_of(self, node: torch.fx.Node) -> RowSet:
        """Return the set of rows that a node is packed for."""
        found = self._sets.get(self._rows.need[node])
        # A part of an operator's results may be unused, or needed by another operator's dense part.
        return self._packed[args_of(node)[0]][1] if found is None else found

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
        return self._once(("size", rows, axis), lambda: self._call(aten.sym_size.int, inverse, axis))

    def _num_rows(self, rows: RowSet) -> Any:
        """Return the number of all rows, as an argument of a node."""
        batch, length = self._size(rows, 0), self._size(rows, 1)
        if isinstance(batch, int) and isinstance(length, int):
            return batch * length
        return self._call(operator.mul, batch, length)

    def _other_sizes(self, node: torch.fx.Node, axes: Axes, given: Sequence[Any] = ()) -> list[Any]:
        """Return the sizes of the dimensions that are no rows, as arguments of a node."""
        found: list[Any] = []
        for i in other_dims(axes):
            size = shape_of(node)[i]
            if not isinstance(size, int):
                size = given[i] if i < len(given) else None
                if not isinstance(size, torch.fx.Node):
                    raise UnsupportedOperatorError(f"{node} has a varying size besides those of its rows")
            found.append(size)
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
        axes = self._rows.values[node].axes
        return self._once((node, rows), lambda: self._take_dense(node, axes, rows))

    def _take_dense(self, node: torch.fx.Node, axes: Axes, rows: RowSet) -> torch.fx.Node:
        """Return a tensor with all rows, packed."""
        order = [*dims_of_rows(axes), *other_dims(axes)]
        if order != sorted(order):
            node = self._call(aten.permute.default, node, order)
        if len(dims_of_rows(axes)) == 2:
            node = self._call(aten.flatten.using_ints, node, 0, 1)
        return self._call(take_rows, node, self._input(rows, "rows"))

    def _operand(self, operand: torch.fx.Node, node: torch.fx.Node, rows: RowSet) -> torch.fx.Node:
        """Return an operand of an operator on each element, for the rows of a set."""
        if operand in self._rows.values:
            if rank_of(operand) != rank_of(node):
                raise UnsupportedOperatorError(f"{node} broadcasts rows")
            return self._take(operand, rows)
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            return operand
        axes = self._rows.values[node].axes
        aligned = axes[rank_of(node) - rank_of(operand) :]
        sizes = shape_of(operand)
        kept = tuple(
            None if label and same(size, 1) else label for label, size in zip(aligned, sizes, strict=True)
        )
        dropped = [i for i, label in enumerate(aligned) if label and not kept[i]]
        has = [label for label in kept if label]
        if not has and not dropped:
            return operand
        missing = len(other_dims(axes)) - len(other_dims(aligned)) if has else 0

        def make() -> torch.fx.Node:
            found, labels = operand, list(kept)
            for i in reversed(dropped):
                found = self._call(aten.squeeze.dim, found, i)
                del labels[i]
            if has:
                found = self._rows_of(found, tuple(labels), rows)
            for _ in range(missing):
                found = self._call(aten.unsqueeze.default, found, 1)
            return found

        return self._once((operand, rows, axes, rank_of(node)), make)

    def _rows_of(self, operand: torch.fx.Node, axes: Axes, rows: RowSet) -> torch.fx.Node:
        """Return an operand with some dimensions of rows, for the rows of a set."""
        if is_packable(axes):
            return self._take_dense(operand, axes, rows)
        # The rows of one sequence, or one row of each.
        (place,) = dims_of_rows(axes)
        index = self._input(rows, "length" if axes[place] == LENGTH else "batch")
        order = [place, *other_dims(axes)]
        if order != sorted(order):
            operand = self._call(aten.permute.default, operand, order)
        value = operand.meta["val"]
        if value.dim() == 2 and value.dtype.is_floating_point:
            return self._call(aten.embedding.default, operand, index)
        return self._call(aten.index_select.default, operand, 0, index)

    def _unpack(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return a packed tensor with all rows, those that are not needed with any content."""
        packed, rows = self._packed[node]
        value = self._rows.values[node]

        def make() -> torch.fx.Node:
            inverse = self._input(rows, "inverse")
            given = self._input(rows, "rows")
            if name_of(node) in LOSSES:
                # The loss of an ignored label is zero.
                full = self._call(put_rows, packed, given, self._num_rows(rows))
            else:
                flat = self._once(("flat", rows), lambda: self._call(aten.view.default, inverse, [-1]))
                full = self._call(fill_rows, packed, flat, given)
            others = other_dims(value.axes)
            if BATCH in value.axes:
                sizes = [self._size(rows, 0), self._size(rows, 1), *self._other_sizes(node, value.axes)]
                full = self._call(aten.view.default, full, sizes)
            order = [*dims_of_rows(value.axes), *others]
            if order != sorted(order):
                full = self._call(aten.permute.default, full, [order.index(i) for i in range(len(order))])
            return full

        if value.is_sliced:
            raise UnsupportedOperatorError(f"{node} is a part of packed sequences")
        return self._once((node, "full"), make)

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
        name, axes = name_of(node), self._rows.values[node].axes
        source: Any = args_of(node)[0]
        if node.target is operator.getitem:
            packed, have = self._packed[source]
            item = self._call(operator.getitem, packed, args_of(node)[1])
            return item if have == rows else self._call(take_rows, item, self._input(rows, "within"))
        if name == "embedding":
            weight, index, *others = args_of(node)
            taken = self._once((index, rows), lambda: self._take_dense(index, axes[:-1], rows))
            return self._call(node.target, weight, taken, *others, **node.kwargs)
        if name in LOSSES:
            return self._loss(node, rows)
        if self._rows.values[node].is_sliced and name == "slice":
            # The loss ignores the labels of the other rows.
            return self._take(source, rows)
        if name in VIEWS:
            given = args_of(node)[1] if name in ("view", "reshape", "_unsafe_view") else ()
            sizes = [-1, *self._other_sizes(node, axes, given)]
            return self._call(aten.reshape.default, self._take(source, rows), sizes)
        if name == "cat" and len(node.all_input_nodes) > 1:
            parts = [n for n in node.all_input_nodes if n in self._rows.values]
            if len(parts) == 1:
                return self._take(parts[0], rows)  # the others have no elements
        if name in ("transpose", "permute"):
            return self._permute(node, rows)
        if name == "dropout":
            return self._dropout(node, rows)
        if name == ATTENTION:
            return self._attention(node, rows)
        if name == "type_as":
            return self._call(aten.to.dtype, self._take(source, rows), node.meta["val"].dtype)
        if is_pointwise(node):
            return self._call_same(node, {n: self._operand(n, node, rows) for n in node.all_input_nodes})
        packed_inputs = {n: self._take(n, rows) for n in node.all_input_nodes if n in self._rows.values}
        if name == "gather":
            index = args_of(node)[2]
            packed_inputs[index] = self._take_dense(index, axes, rows)
        by = axes if name in ("unsqueeze", "stack") else self._rows.values[next(iter(packed_inputs))].axes
        return self._call_same(node, packed_inputs, by)

    def _attention(self, node: torch.fx.Node, rows: RowSet) -> torch.fx.Node:
        """Return attention of packed sequences."""
        query, *others = args_of(node)[:3]
        keys = self._sets[Need.ATTENDED]
        found = self._call(
            packed_attention,
            self._take(query, rows),
            *(self._take(other, keys) for other in others),
            *(self._input(of, "ends") for of in (rows, keys)),
            self._kinds[self._rows.attention[node]] == CAUSAL,
            argument(node, "scale"),
        )
        return self._call(operator.getitem, found, 0)

    def _permute(self, node: torch.fx.Node, rows: RowSet) -> torch.fx.Node:
        """Return a tensor with other dimensions in another order; a packed tensor's rows stay the first."""
        source, *dims = args_of(node)
        before = self._rows.values[source].axes
        order = list(range(len(before)))
        if name_of(node) == "permute":
            order = [d % len(before) for d in dims[0]]
        else:
            one, other = (d % len(before) for d in dims)
            order[one], order[other] = order[other], order[one]
        others = other_dims(before)
        packed = [0, *(1 + others.index(d) for d in order if d in others)]
        taken = self._take(source, rows)
        return taken if packed == sorted(packed) else self._call(aten.permute.default, taken, packed)

    def _call_same(
        self, node: torch.fx.Node, packed: Mapping[torch.fx.Node, torch.fx.Node], axes: Axes | None = None
    ) -> Any:
        """Return a call of the same operator on packed tensors.

        Args:
            node: the operator.
            packed: its arguments with rows -> packed ones.
            axes: the dimensions that its arguments count; ``None`` if it has no such argument.
        """
        args, kwargs = cast(Any, torch.fx.map_arg((node.args, node.kwargs), lambda n: packed.get(n, n)))
        if axes is not None:
            args, kwargs = list(args), dict(kwargs)
            for i, parameter in enumerate(schema_of(node).arguments):
                where: Any = args if i < len(args) else kwargs
                key: Any = i if i < len(args) else parameter.name
                if parameter.name in ("dim", "dims") and argument(node, parameter.name) is not None:
                    where[key] = _moved(argument(node, parameter.name), axes)
                elif parameter.name == "size" and name_of(node) == "expand":
                    where[key] = [-1, *(where[key][d] for d in other_dims(self._rows.values[node].axes))]
        return self._call(node.target, *args, **kwargs)

    def _dropout(self, node: torch.fx.Node, rows: RowSet) -> Any:
        """Return dropout with the random numbers that all rows draw, of which some are used."""
        source, p, trained = args_of(node)
        packed = self._take(source, rows)
        if not trained or p == 0:
            return packed
        value = source.meta["val"]
        axes = self._rows.values[node].axes
        others = iter(self._other_sizes(source, axes))
        of_rows = {BATCH: 0, LENGTH: 1}
        sizes = [
            next(others)
            if not label
            else self._num_rows(rows)
            if label == ROWS
            else self._size(rows, of_rows[label])
            for label in axes
        ]
        ones = self._call(aten.ones.default, sizes, dtype=value.dtype, device=value.device)
        noise = self._call(aten.dropout.default, ones, p, True)
        return self._call(aten.mul.Tensor, packed, self._take_dense(noise, axes, rows))

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
        if node not in self._rows.terminals or (source not in self._packed and name_of(node) not in LOSSES):
            return False
        name = name_of(node)
        if name in LOSSES:
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
        if value is None or not is_packable(value.axes):
            return False
        return logits in self._packed or not value.is_sliced


def _moved(dim: Any, axes: Axes) -> Any:
    """Return dimensions of a tensor as those of the packed one."""
    if isinstance(dim, (list, tuple)):
        return [_moved(d, axes) for d in dim]
    return dim if dim is None else 1 + other_dims(axes).index(dim % len(axes))
