"""Data-dependent sizes that torch.export assumed to be equal to other sizes.

Where an unknown size would be broadcast if it were 1, torch.export assumes that it equals the other size,
writes a check into the program, and continues with the assumption. A graph does not contain these checks.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from torch2ort._torch import symbolic_shapes as private
from torch2ort.errors import UnsupportedOperatorError

kernels_chosen_unconditionally = private.kernels_chosen_unconditionally
arithmetic_done_once = private.arithmetic_done_once
guards_with_lines = private.guards_with_lines


_BY_STATISTICS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


class Conditions(NamedTuple):
    """Numbers of conditions on sizes that a trace and its program's later forms rely on; they only grow.

    Attributes:
        on_inputs: conditions on sizes of inputs.
        on_values: conditions on data-dependent sizes.
    """

    on_inputs: int
    on_values: int


def conditions(graph: torch.fx.Graph) -> Conditions:
    """Return the current numbers for the trace of a program."""
    environment = _environment(graph)
    if environment is None:
        return Conditions(0, 0)
    return Conditions(len(private.guards(environment)), private.num_deferred_asserts(environment))


def added_conditions(graph: torch.fx.Graph, known: Conditions, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Return the conditions on sizes of inputs added since ``known``, over ``size(input, dimension)``.

    Args:
        graph: the graph of the traced program.
        known: the earlier numbers of conditions.
        inputs: the traced inputs, in order.

    Raises:
        UnsupportedOperatorError: the sizes of the inputs do not determine whether a condition holds.
    """
    environment = _environment(graph)
    added = [] if environment is None else private.guards(environment)[known.on_inputs :]
    texts = _texts(inputs)
    try:
        return [private.python_text(condition, texts) for condition in added]
    except KeyError:
        raise UnsupportedOperatorError(
            f"an operator of the model can be translated for some only of the sizes that were to vary "
            f"({added}). Export with these sizes fixed"
        ) from None


def line_of_last_condition(graph: torch.fx.Graph) -> str:
    """Return the last condition made on sizes of inputs, and the line of the model that it comes from."""
    condition, line = _conditions_with_lines(graph)[-1]
    return f"{condition}{' at ' * bool(line)}{line}"


def lines_of_conditions(graph: torch.fx.Graph) -> dict[str, str]:
    """Return condition on sizes of inputs, over ``size(input, dimension)`` -> the line of the model."""
    return dict(_conditions_with_lines(graph))


def _conditions_with_lines(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    """Return each condition and its line; it is over torch's symbols if no input has one of its sizes."""
    environment = _environment(graph)
    if environment is None:
        return []
    texts = {
        symbol: readable_condition(source) for symbol, source in private.size_sources(environment).items()
    }
    found: list[tuple[str, str]] = []
    for condition, line in zip(private.guards(environment), private.guard_lines(environment), strict=True):
        text = str(condition)
        with contextlib.suppress(KeyError):
            text = private.python_text(condition, texts)
        found.append((text, line))
    return found


def readable_condition(text: str) -> str:
    """Return a condition of torch with each size written as ``size(input, dimension)``."""
    return re.sub(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]", r"size(\1, \2)", text)


def conditions_of_statistics(graph: torch.fx.Graph, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Return the conditions that normalizations get several values per channel for their variance.

    Eager PyTorch requires it. A trace does not, because it assumes that no varying size is 1.

    Args:
        graph: the graph of a program as it was traced.
        inputs: the traced inputs, in order.
    """
    texts = _texts(inputs)
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.target not in _BY_STATISTICS or not node.args[5]:
            continue
        rows, _, *others = node.args[0].meta["val"].shape
        count = math.prod(others, start=rows if node.target is torch.ops.aten.batch_norm.default else 1)
        if isinstance(count, torch.SymInt):
            # A data-dependent size is the size of no input.
            with contextlib.suppress(KeyError):
                found[private.python_text(sympy.Gt(count.node.expr, 1, evaluate=False), texts)] = None
    return list(found)


def _texts(inputs: Sequence[torch.Tensor]) -> dict[str, str]:
    return {
        str(size): f"size({i}, {d})" for i, tensor in enumerate(inputs) for d, size in enumerate(tensor.shape)
    }


def deferred_asserts(graph: torch.fx.Graph) -> list[sympy.Expr]:
    """Return the conditions on data-dependent sizes assumed since :func:`clear_deferred_asserts`."""
    environment = _environment(graph)
    return [] if environment is None else private.deferred_asserts(environment)


def clear_deferred_asserts(graph: torch.fx.Graph) -> None:
    """Discard the conditions that :func:`deferred_asserts` returns."""
    environment = _environment(graph)
    if environment is not None:
        private.clear_deferred_asserts(environment)


def unify_symbols(graph: torch.fx.Graph, names: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
    """Tell the trace of a graph that some data-dependent sizes are other names of given ones."""
    environment = _environment(graph)
    if environment is not None:
        private.replace_symbols(environment, names)


def forget_new_sizes(graph: torch.fx.Graph) -> None:
    """Discard data-dependent sizes that an earlier trace made and no tensor of a later one has."""
    environment = _environment(graph)
    if environment is not None:
        private.forget_new_sizes(environment)


def _environment(graph: torch.fx.Graph) -> Any:
    found = (private.environment(node.meta.get("val")) for node in graph.nodes)
    return next((environment for environment in found if environment is not None), None)


def assumes_equal_sizes(program: torch.export.ExportedProgram) -> bool:
    """Return True if a size was assumed to equal another, even where eager PyTorch raises if they differ."""
    return any(node.target is operator.eq for node in _conditions(program))


def expands_unknown(program: torch.export.ExportedProgram) -> torch.fx.Node | None:
    """Return a node of an ``expand`` of such a size: the assumption makes it a no-op that the graph lacks."""
    conditions = _conditions(program)
    for node in conditions:
        # One check says that the size is 1 or the wanted one, and another that it is the wanted one.
        if node.target is operator.or_ and any(part in conditions for part in node.args):
            return node
    return None


def _conditions(program: torch.export.ExportedProgram) -> dict[torch.fx.Node, None]:
    checks = [node.args[0] for node in program.graph.nodes if node.target is private.ASSERT]
    return dict.fromkeys(condition for condition in checks if isinstance(condition, torch.fx.Node))
