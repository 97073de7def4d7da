"""Dependence analysis: the rows that each value of a program is computed from, and those that are read."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch2ort.program.alias_analysis import written_by
from torch2ort.program.sparsity.inspection_graph import InspectionGraph
from torch2ort.program.sparsity.nodes import (
    ATTENTION,
    LOSSES,
    REDUCTIONS,
    VIEWS,
    args_of,
    argument,
    is_empty,
    is_pointwise,
    name_of,
    rank_of,
    shape_of,
)
from torch2ort.program.sparsity.row_axes import (
    BATCH,
    KEYS,
    LENGTH,
    ROWS,
    Axes,
    same,
    viewed,
)
from torch2ort.program.sparsity.row_values import Mask, Need, Rows, RowValue, dims_without_rows

aten = torch.ops.aten
# Operators of one tensor whose result has the same dimensions.
_SAME = frozenset({"to", "_to_copy", "type_as", "contiguous", "alias", "detach", "clone", "hardswish"})


class Analysis:
    """The analysis of one program.

    Args:
        graph: the program; it is not changed.
        constants: inputs that carry no gradient.
    """

    def __init__(self, graph: torch.fx.Graph, constants: Sequence[torch.fx.Node]) -> None:
        self._graph = graph
        self.inspection = InspectionGraph(graph, constants)
        self.values: dict[torch.fx.Node, RowValue] = {}
        self._terminals: dict[torch.fx.Node, torch.fx.Node] = {}
        # Values whose rows are the keys of an operator, with the operator.
        self._keys: set[tuple[torch.fx.Node, torch.fx.Node]] = set()
        self._attention_masks: dict[torch.fx.Node, int] = {}
        self._rules = _rules(self)

    def run(self) -> Rows | None:
        """Return the result; ``None`` if the program has no rows."""
        seeds = list(self._seeds())
        if not seeds:
            return None
        index = seeds[0][1]
        self._sizes = shape_of(index)[0], shape_of(index)[1]
        if any(same(size, 1) for size in self._sizes):
            return None
        self.inspection.start(index)
        mine = {
            node: RowValue((BATCH, LENGTH, *[None] * (rank_of(node) - 2)))
            for node, other in seeds
            if all(map(same, shape_of(other)[:2], self._sizes))
        }
        for node in self._graph.nodes:
            if node in mine:
                self.values[node] = mine[node]
            elif node.op == "call_function" and any(n in self.values for n in node.all_input_nodes):
                found = self._value(node)
                if found is not None:
                    self.values[node] = found
        need, reasons = self._needs()
        return Rows(
            self._sizes,
            index,
            self.values,
            need,
            self._terminals,
            self.inspection,
            reasons,
            self._attention_masks,
        )

    def _seeds(self) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
        """Yield the first values with rows, and for each a tensor of the sizes of its rows."""
        for node in self._graph.nodes:
            if name_of(node) == "embedding":
                if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
                    continue  # the gradient of a row depends on the others
                index = args_of(node)[1]
                if rank_of(index) == 2 and self.inspection.can_compute(index):
                    yield node, index
        inputs = self._graph.find_nodes(op="placeholder")
        given = [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
        for node in given:
            if rank_of(node) < 3 or not node.meta["val"].dtype.is_floating_point or not node.users:
                continue
            for index in given:
                is_sample = rank_of(index) == 2 and self.inspection.can_compute(index)
                if is_sample and all(map(same, shape_of(index), shape_of(node)[:2])):
                    yield node, index
                    break

    def _value(self, node: torch.fx.Node) -> RowValue | None:
        """Return the rows of a node's result; ``None`` if it has none, or if they are unknown."""
        if any(written in self.values for written in written_by(node)):
            return None
        if node.target is operator.getitem:
            return self.values.get(args_of(node)[0])
        rule = self._rules.get(name_of(node))
        if rule is None and is_pointwise(node):
            rule = self._pointwise
        if rule is None or (isinstance(node.meta.get("val"), (list, tuple)) and name_of(node) not in _MANY):
            return None
        try:
            found = rule(node)
        except KeyError:
            return None
        if found is None:
            return None
        if found.live is not None:
            return replace(found, is_masked=True)
        lives = [self.values[n].live for n in node.all_input_nodes if n in self.values]
        mixes_rows = KEYS in found.axes or any(user is node for _, user in self._keys)
        if mixes_rows or None in lives:
            return replace(found, is_masked=False)
        union = self.inspection.union([live for live in lives if live is not None])
        return replace(found, live=union, is_masked=False)

    # --- rules: each returns the rows of a node's result, or None

    def _first(self, node: torch.fx.Node) -> RowValue:
        """Return the rows of the first argument, which alone has rows."""
        first, *others = node.all_input_nodes
        if first is not args_of(node)[0] or any(n in self.values for n in others):
            raise KeyError(node)
        return self.values[first]

    def _pointwise(self, node: torch.fx.Node) -> RowValue | None:
        rank = rank_of(node)
        with_rows = [n for n in node.all_input_nodes if n in self.values]
        aligned = [(None,) * (rank - rank_of(n)) + self.values[n].axes for n in with_rows]
        starts = {(self.values[n].start, self.values[n].is_sliced) for n in with_rows}
        if len(set(aligned)) != 1 or len(starts) != 1:
            return None
        value = replace(self.values[with_rows[0]], axes=aligned[0], live=None, masks=(), is_softmax=False)
        if not all(self._keeps_rows(n, node, value.axes) for n in with_rows):
            return None
        if KEYS in value.axes:
            return self._scores(node, value, with_rows)
        live = self._live(node, value, with_rows)
        if value.is_sliced and rank > 0 and self._reads_free_rows(node, value):
            return None
        return replace(value, live=live)

    def _keeps_rows(self, before: torch.fx.Node, after: torch.fx.Node, axes: Axes) -> bool:
        """Return True if the dimensions of rows are as large as before: none of size 1 was expanded."""
        more = len(axes) - rank_of(before)
        places = [i for i, label in enumerate(axes) if label]
        return all(same(shape_of(after)[i], shape_of(before)[i - more]) for i in places)

    def _reads_free_rows(self, node: torch.fx.Node, value: RowValue) -> bool:
        """Return True if an operand without rows has sizes along the dimensions of rows."""
        rank = rank_of(node)
        for operand in node.all_input_nodes:
            if operand in self.values or not isinstance(operand.meta.get("val"), torch.Tensor):
                continue
            shape = shape_of(operand)
            aligned = value.axes[rank - len(shape) :]
            if any(label and not same(size, 1) for label, size in zip(aligned, shape, strict=True)):
                return True
        return False

    def _scores(
        self, node: torch.fx.Node, value: RowValue, with_rows: Sequence[torch.fx.Node]
    ) -> RowValue | None:
        """Return scores of attention after an operator for each element, and note the operands that mask."""
        values = [self.values[n] for n in with_rows]
        masks = tuple(mask for found in values for mask in found.masks)
        name = name_of(node)
        if any(found.is_softmax for found in values):
            keeps_zeros = name in ("mul", "div", "nan_to_num") or (
                name == "masked_fill" and args_of(node)[2] in (0, 0.0)
            )
            is_first = self.values.get(args_of(node)[0]) in values
            return replace(value, is_softmax=True) if keeps_zeros and is_first else None
        mask = self._mask(node, with_rows, value.axes)
        if mask is None and name in ("where", "masked_fill"):
            return None  # it may unmask
        is_first = args_of(node)[0] in with_rows and self.values[args_of(node)[0]].masks == masks
        keeps_masks = name == "add" or (name == "sub" and is_first) or mask is not None
        if masks and (not keeps_masks or "alpha" in node.kwargs):
            return None
        return replace(value, masks=(*masks, *([mask] if mask else [])))

    def _mask(self, node: torch.fx.Node, with_rows: Sequence[torch.fx.Node], axes: Axes) -> Mask | None:
        """Return the operand by which an operator on scores masks keys; ``None`` if there is none."""
        name, (scores, *others) = name_of(node), with_rows
        if others:
            return None
        if name == "masked_fill" and args_of(node)[0] is scores:
            return self._mask_of(args_of(node)[1], "drop", axes, args_of(node)[2])
        if name == "where" and args_of(node)[1] is scores:
            return self._mask_of(args_of(node)[0], "keep", axes, args_of(node)[2])
        if name == "where" and args_of(node)[2] is scores:
            return self._mask_of(args_of(node)[0], "drop", axes, args_of(node)[1])
        if name == "add" and "alpha" not in node.kwargs:
            operand = next((n for n in args_of(node)[:2] if n is not scores), None)
            return self._mask_of(self._without_bias(operand), "add", axes)
        return None

    def _without_bias(self, operand: Any) -> Any:
        """Return the mask of a sum of a mask and a bias, as T5 adds them; other operands as they are."""
        if not isinstance(operand, torch.fx.Node) or name_of(operand) != "add" or "alpha" in operand.kwargs:
            return operand
        parts = [n for n in args_of(operand)[:2] if isinstance(n, torch.fx.Node)]
        known = [n for n in parts if n not in self.values and self.inspection.can_compute(n)]
        is_whole = len(known) == 1 and rank_of(known[0]) == rank_of(operand)
        return known[0] if is_whole and len(parts) == 2 else operand

    def _mask_of(self, operand: Any, kind: str, axes: Axes, fill: Any = -math.inf) -> Mask | None:
        """Return a mask whose values the inspection computes, and whose scores are low."""
        if not isinstance(operand, torch.fx.Node) or operand in self.values:
            return None
        if isinstance(fill, torch.fx.Node):
            fill = math.inf if fill in self.values else self.inspection.number(fill)
        if not isinstance(fill, (int, float)) or fill > _LOW or not self.inspection.can_compute(operand):
            return None
        return Mask(operand, kind, axes)

    def _live(
        self, node: torch.fx.Node, value: RowValue, with_rows: Sequence[torch.fx.Node]
    ) -> torch.fx.Node | None:
        """Return the rows that the result of a multiplication by a mask, or a choice, depends on."""
        name = name_of(node)
        if value.is_sliced or len(with_rows) != 1:
            return None
        x = with_rows[0]
        if name in ("mul", "multiply"):
            others = [n for n in args_of(node)[:2] if n is not x]
            if others and isinstance(others[0], torch.fx.Node):
                return self.inspection.rows_where(others[0], value.axes, zero=False)
        elif name == "masked_fill" and args_of(node)[0] is x:
            return self.inspection.rows_where(args_of(node)[1], value.axes, zero=True)
        elif name == "where" and args_of(node)[0] is not x and x in args_of(node)[1:]:
            both = args_of(node)[1] is x and args_of(node)[2] is x
            if not both:
                is_other = args_of(node)[2] is x
                return self.inspection.rows_where(args_of(node)[0], value.axes, zero=is_other)
        return None

    def _same(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node) if name_of(node) != "type_as" else self.values[args_of(node)[0]]
        return replace(value, live=None) if rank_of(node) == len(value.axes) else None

    def _dropout(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        # A masked score may become 0, and a slice draws numbers for some rows.
        is_refused = value.is_sliced or (KEYS in value.axes and not value.is_softmax)
        return None if is_refused else replace(value, live=None)

    def _view(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        source = args_of(node)[0]
        rows: Any = self._sizes
        if value.is_sliced:
            rows = [s for s, label in zip(shape_of(source), value.axes, strict=True) if label]
        if len(rows) != 2:
            return None
        axes = viewed(value.axes, shape_of(source), shape_of(node), rows)
        return None if axes is None else replace(value, axes=axes, live=None)

    def _first_of_sizes(self, node: torch.fx.Node) -> RowValue:
        """Return the rows of the first argument of an operator whose other arguments are numbers."""
        if any(n in self.values for n in node.all_input_nodes if n is not args_of(node)[0]):
            raise KeyError(node)
        return self.values[args_of(node)[0]]

    def _expand(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        axes = (None,) * (rank_of(node) - len(value.axes)) + value.axes
        if not self._keeps_rows(args_of(node)[0], node, axes):
            return None
        return replace(value, axes=axes, live=None)

    def _transpose(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        axes = list(value.axes)
        one, other = (d % len(axes) for d in args_of(node)[1:3])
        axes[one], axes[other] = axes[other], axes[one]
        return replace(value, axes=tuple(axes), live=None)

    def _permute(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        order = [d % len(value.axes) for d in args_of(node)[1]]
        return replace(value, axes=tuple(value.axes[d] for d in order), live=None)

    def _unsqueeze(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        axes = list(value.axes)
        axes.insert(args_of(node)[1] % rank_of(node), None)
        return replace(value, axes=tuple(axes), live=None)

    def _squeeze(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        dims = dims_without_rows(argument(node, "dim"), value)
        if dims is None or rank_of(node) != len(value.axes) - len(dims):
            return None
        axes = tuple(label for i, label in enumerate(value.axes) if i not in dims)
        return replace(value, axes=axes, live=None)

    def _slice(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        dim = (argument(node, "dim") or 0) % len(value.axes)
        if same(shape_of(node)[dim], shape_of(args_of(node)[0])[dim]):
            return replace(value, live=None)
        if value.axes[dim] is None:
            return replace(value, live=None)
        start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
        end = _MAX if end is None else end
        if value.axes[dim] != LENGTH or value.is_sliced or KEYS in value.axes or step != 1:
            return None
        if not isinstance(start, int) or not isinstance(end, int):
            return None
        if value.axes[:2] == (BATCH, LENGTH):
            self._terminals[node] = self.inspection.tokens(start, end)
        return replace(value, start=start, is_sliced=True, live=None) if start >= 0 else None

    def _select(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        dim, index = args_of(node)[1] % len(value.axes), args_of(node)[2]
        if value.axes[dim] is None:
            return replace(value, axes=value.axes[:dim] + value.axes[dim + 1 :], live=None)
        if value.axes[:2] == (BATCH, LENGTH) and dim == 1 and not value.is_sliced and isinstance(index, int):
            end = _MAX if index == -1 else index + 1
            self._terminals[node] = self.inspection.tokens(index, end)
        return None

    def _index_select(self, node: torch.fx.Node) -> RowValue | None:
        source, dim, index = args_of(node)
        value = self.values[source]
        if value.axes[dim] is None:
            return None if index in self.values else replace(value, live=None)
        is_token = value.axes[:2] == (BATCH, LENGTH) and dim % len(value.axes) == 1
        if (
            is_token
            and not value.is_sliced
            and index not in self.values
            and self.inspection.can_compute(index)
        ):
            self._terminals[node] = self.inspection.tokens_at(index)
        return None

    def _index(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        indices = args_of(node)[1]
        if value.axes[:2] != (BATCH, LENGTH) or value.is_sliced or len(indices) != 2:
            return None
        if all(self._is_known_index(n) for n in indices):
            self._terminals[node] = self.inspection.rows_at(*indices)
        return None

    def _is_known_index(self, index: Any) -> bool:
        if not isinstance(index, torch.fx.Node) or not self.inspection.can_compute(index):
            return False
        return index.meta["val"].dtype not in (torch.bool, torch.uint8)

    def _parts(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first_of_sizes(node)
        dim = argument(node, "dim") or 0
        return None if dims_without_rows(dim, value) is None else replace(value, live=None)

    def _unbind(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        dim = (argument(node, "dim") or 0) % len(value.axes)
        if value.axes[dim]:
            return None
        return replace(value, axes=value.axes[:dim] + value.axes[dim + 1 :], live=None)

    def _cat(self, node: torch.fx.Node) -> RowValue | None:
        parts = [n for n in args_of(node)[0] if not is_empty(n)]
        dim = argument(node, "dim") or 0
        if len(parts) == 1:
            return replace(self.values[parts[0]], live=None)
        value = self.values[next(n for n in parts if n in self.values)]
        if dims_without_rows(dim, value) is None or KEYS in value.axes:
            return None
        if any(n not in self.values or self.values[n] != value for n in parts):
            return None
        return replace(value, live=None)

    def _stack(self, node: torch.fx.Node) -> RowValue | None:
        parts = args_of(node)[0]
        value = self.values[parts[0]]
        if any(n not in self.values or self.values[n] != value for n in parts):
            return None
        axes = list(value.axes)
        axes.insert((argument(node, "dim") or 0) % rank_of(node), None)
        return replace(value, axes=tuple(axes), live=None)

    def _linear(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        return None if value.axes[-1] else replace(value, live=None)

    def _addmm(self, node: torch.fx.Node) -> RowValue | None:
        bias, x, weight = args_of(node)[:3]
        if bias in self.values or weight in self.values or rank_of(bias) != 1 or node.kwargs:
            return None
        value = self.values[x]
        return None if value.axes[-1] else replace(value, live=None)

    def _matmul(self, node: torch.fx.Node) -> RowValue | None:
        one, other = args_of(node)[:2]
        left, right = self.values.get(one), self.values.get(other)
        if left is None:
            return None
        if right is None:
            return None if left.axes[-1] or rank_of(other) != 2 else replace(left, live=None)
        if left.is_sliced or right.is_sliced or rank_of(one) != rank_of(other):
            return None
        if left.axes[:-2] != right.axes[:-2] or BATCH not in left.axes[:-2] or LENGTH in left.axes[:-2]:
            return None
        ends = left.axes[-2:], right.axes[-2:]
        if ends == ((LENGTH, None), (None, LENGTH)):
            self._keys.add((other, node))
            return RowValue((*left.axes[:-1], KEYS))
        if ends == ((LENGTH, KEYS), (LENGTH, None)) and left.is_softmax:
            self._keys.add((other, node))
            return RowValue((*left.axes[:-1], None))
        return None

    def _softmax(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        if value.axes[args_of(node)[1]] == KEYS and name_of(node) != "log_softmax":
            if value.is_softmax:
                return None
            self.inspection.attends(value.masks, is_causal=False)
            return replace(value, masks=(), is_softmax=True, live=None)
        return None if value.axes[args_of(node)[1]] else replace(value, live=None)

    def _attention(self, node: torch.fx.Node) -> RowValue | None:
        query, key, content = args_of(node)[:3]
        value, keys = self.values[query], [self.values.get(n) for n in (key, content)]
        mask = argument(node, "attn_mask")
        if mask in self.values or value.axes[0] != BATCH or value.axes[-2:] != (LENGTH, None):
            return None
        if value.is_sliced:
            return None
        if keys == [None, None]:
            return replace(value, live=None)
        if any(k is None or k.is_sliced or k.axes != value.axes for k in keys):
            return None
        masks: tuple[Mask, ...] = ()
        is_known = mask is None
        mask = self._without_bias(mask)
        if isinstance(mask, torch.fx.Node) and self.inspection.can_compute(mask):
            kind = "keep" if mask.meta["val"].dtype is torch.bool else "add"
            masks = (Mask(mask, kind, (*value.axes[:-1], KEYS)),)
            is_known = True
        place = self.inspection.attends(masks, is_causal=bool(argument(node, "is_causal")))
        if place is not None and is_known:
            self._attention_masks[node] = place
        self._keys |= {(key, node), (content, node)}
        return replace(value, live=None)

    def _norm(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        count = len(args_of(node)[1])
        return None if any(value.axes[-count:]) else replace(value, live=None)

    def _reduce(self, node: torch.fx.Node) -> RowValue | None:
        value = self._first(node)
        dims = dims_without_rows(argument(node, "dim"), value)
        if dims is None or KEYS in value.axes:
            return None
        if argument(node, "keepdim"):
            return replace(value, live=None)
        axes = tuple(label for i, label in enumerate(value.axes) if i not in dims)
        return replace(value, axes=axes, live=None)

    def _gather(self, node: torch.fx.Node) -> RowValue | None:
        source, dim, index = args_of(node)[:3]
        value = self.values[source]
        if index in self.values or dims_without_rows(dim, value) is None or value.is_sliced:
            return None
        places = [i for i, label in enumerate(value.axes) if label]
        if not all(same(shape_of(index)[i], shape_of(source)[i]) for i in places):
            return None
        return replace(value, live=None)

    def _loss(self, node: torch.fx.Node) -> RowValue | None:
        logits, target = args_of(node)[:2]
        value = self.values[logits]
        ignored, reduction = argument(node, "ignore_index"), argument(node, "reduction")
        labels = tuple(label for i, label in enumerate(value.axes) if i != (1 if len(value.axes) > 1 else 0))
        if any(n in self.values for n in node.all_input_nodes if n is not logits):
            return None
        if target.meta["val"].dtype.is_floating_point:
            return None
        if not self.inspection.can_compute(target) or labels not in ((ROWS,), (BATCH, LENGTH)):
            return None
        read = self.inspection.labels(target, ignored, value)
        if reduction != 0:
            self._terminals[node] = read
            return None
        return None if value.is_sliced else RowValue(labels, live=read)

    # --- the rows that are needed

    def _needs(self) -> tuple[dict[torch.fx.Node, Need], dict[torch.fx.Node, torch.fx.Node]]:
        """Return the need of each value, and for those that are read in all rows, the reader."""
        need = dict.fromkeys(self.values, Need.NONE)
        reasons: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in reversed(self._graph.nodes):
            if node not in self.values:
                continue
            for user in node.users:
                wanted, reader = self._needed_by(node, user, need)
                need[node] = max(need[node], wanted)
                if wanted is Need.ALL:
                    reasons.setdefault(node, reasons.get(reader, reader))
        return need, reasons

    def _needed_by(
        self, node: torch.fx.Node, user: torch.fx.Node, need: dict[torch.fx.Node, Need]
    ) -> tuple[Need, torch.fx.Node]:
        value, other = self.values[node], self.values.get(user)
        if name_of(user) in ("sym_size", "_assert_tensor_metadata"):
            return Need.NONE, user
        if other is None:
            if user in self._terminals:
                self.inspection.read(self._terminals[user])
                return Need.READ, user
            return Need.ALL, user
        if need[user] is Need.ALL and user in self._terminals:
            self.inspection.read(self._terminals[user])
            return Need.READ, user
        if need[user] is Need.ALL and other.live is not None:
            if value.live is not None and not other.is_masked:
                return Need.ALL, user
            self.inspection.read(other.live)
            return Need.READ, user
        if (node, user) in self._keys and Need.NONE < need[user] < Need.ALL:
            return Need.ATTENDED, user
        return need[user], user


# Scores of attention below this number have the weight 0 beside others: exp(-1e4) is 0 in all dtypes.
_LOW = -1e4
# The end of a slice that has none.
_MAX = sys.maxsize
_MANY = frozenset({"split", "split_with_sizes", "chunk", "unbind"})


def _rules(analysis: Analysis) -> dict[str, Callable[[torch.fx.Node], RowValue | None]]:
    """Return the rule for each operator, by its name."""
    a = analysis
    return {
        **dict.fromkeys(_SAME, a._same),
        **dict.fromkeys(VIEWS, a._view),
        **dict.fromkeys(REDUCTIONS, a._reduce),
        **dict.fromkeys(LOSSES, a._loss),
        **dict.fromkeys(("linear", "mm"), a._linear),
        **dict.fromkeys(("matmul", "bmm"), a._matmul),
        **dict.fromkeys(("softmax", "_softmax", "log_softmax"), a._softmax),
        **dict.fromkeys(("layer_norm", "rms_norm"), a._norm),
        **dict.fromkeys(("split", "split_with_sizes", "chunk", "glu"), a._parts),
        **{
            "dropout": a._dropout,
            "expand": a._expand,
            "transpose": a._transpose,
            "permute": a._permute,
            "unsqueeze": a._unsqueeze,
            "squeeze": a._squeeze,
            "slice": a._slice,
            "select": a._select,
            "index": a._index,
            "index_select": a._index_select,
            "unbind": a._unbind,
            "cat": a._cat,
            "stack": a._stack,
            "addmm": a._addmm,
            "gather": a._gather,
            ATTENTION: a._attention,
        },
    }
