"""Names for the varying sizes of a fused region, equal for all regions that compute the same.

A region reads each size from a tensor among its inputs: from one that has the size as a dimension, or from a
tensor without elements that is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from torch2ort.fusion.region import Size
from torch2ort.sizes.expressions import plain, symbol
from torch2ort.sizes.symbols import expression_of, is_number


class CanonicalSizes:
    """The names of one region's sizes.

    Args:
        inputs: the tensors that the region reads.
        numbers: nodes of the numbers that the region reads, computed from sizes.

    Attributes:
        extra_sizes: the nodes of ``numbers``, or their operands, that no dimension of an input determines.
            The region gets them as dimensions of a tensor without elements.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], numbers: Sequence[torch.fx.Node]) -> None:
        self._names: dict[str, sympy.Expr] = {}
        # Expressions that have a name as a whole, whatever their symbols are.
        self._wholes: list[tuple[sympy.Expr, sympy.Symbol]] = []
        self.extra_sizes: list[torch.fx.Node] = []
        sizes: list[Any] = [size for tensor in inputs for size in tensor.shape]
        varying = [size for size in sizes if isinstance(size, torch.SymInt)]
        for size in varying:
            if expression_of(size).is_Symbol:
                self._name(size)
        for number in numbers:
            self._name_number(number)
        for size in varying:
            self._name(size)

    def of(self, size: int | torch.SymInt) -> Size:
        """Return a size as an expression over the names.

        Raises:
            ValueError: the size depends on a symbol that has no name.
        """
        if isinstance(size, int):
            return size
        found = self._over_names(size)
        if not self._is_known(found):
            raise ValueError(f"no input of the region determines the size {size}")
        return int(found) if found.is_Integer else found

    def _over_names(self, size: torch.SymInt) -> sympy.Expr:
        found = plain(expression_of(size), self._names)
        for whole, name in self._wholes:
            found = found.subs(whole, name)
        return found

    def _is_known(self, size: sympy.Expr) -> bool:
        known = {*self._names.values(), *(name for _, name in self._wholes)}
        return bool(size.free_symbols <= known)

    def _name(self, size: torch.SymInt) -> bool:
        """Give a size a name unless the existing names determine it; return True if it got one."""
        found = self._over_names(size)
        if self._is_known(found):
            return False
        name = symbol(f"n{len(self._names) + len(self._wholes)}")
        if expression_of(size).is_Symbol:
            self._names[str(expression_of(size))] = name
        else:
            self._wholes.append((found, name))
        return True

    def _name_number(self, number: torch.fx.Node) -> None:
        """Give a number a name unless the names of the sizes that it is computed from determine it."""
        value = number.meta["val"]
        if not isinstance(value, torch.SymInt) or self._is_known(self._over_names(value)):
            return
        parts = [node for node in number.all_input_nodes if is_number(node.meta.get("val"))]
        for part in parts:
            self._name_number(part)
        if self._name(value):
            self.extra_sizes.append(number)
