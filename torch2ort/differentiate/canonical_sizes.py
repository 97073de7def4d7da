"""Names for the sizes of a fused region that vary, the same for all regions that compute the same.

A region is told a size by a tensor that it reads: by one that has it as a dimension, or by one without
elements that is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from torch2ort.fusion.region import Size
from torch2ort.sizes.expressions import plain, symbol
from torch2ort.sizes.symbols import expression_of, is_number


class NamedSizes:
    """The names of one region's sizes.

    Args:
        inputs: the tensors that it reads.
        numbers: nodes of the numbers that it reads, computed of sizes.

    Attributes:
        told: those nodes, or what they are computed of, whose numbers no dimension of an input tells.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], numbers: Sequence[torch.fx.Node]) -> None:
        self._names: dict[str, sympy.Expr] = {}
        # What is known as a whole, whatever it is computed of.
        self._wholes: list[tuple[sympy.Expr, sympy.Symbol]] = []
        self.told: list[torch.fx.Node] = []
        sizes: list[Any] = [size for tensor in inputs for size in tensor.shape]
        varying = [size for size in sizes if isinstance(size, torch.SymInt)]
        for size in varying:
            if expression_of(size).is_Symbol:
                self._name(size)
        for number in numbers:
            self._tell(number)
        for size in varying:
            self._name(size)

    def of(self, size: int | torch.SymInt) -> Size:
        """A size over the names.

        Raises:
            ValueError: it cannot be written so.
        """
        if isinstance(size, int):
            return size
        found = self._over_names(size)
        if not self._is_known(found):
            raise ValueError(f"nothing tells the size {size}")
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
        """Give a size a name, if it is not told by those that have one; returns whether it got one."""
        found = self._over_names(size)
        if self._is_known(found):
            return False
        name = symbol(f"n{len(self._names) + len(self._wholes)}")
        if expression_of(size).is_Symbol:
            self._names[str(expression_of(size))] = name
        else:
            self._wholes.append((found, name))
        return True

    def _tell(self, number: torch.fx.Node) -> None:
        """See to it that a number is known, by the sizes that it is computed of."""
        value = number.meta["val"]
        if not isinstance(value, torch.SymInt) or self._is_known(self._over_names(value)):
            return
        parts = [node for node in number.all_input_nodes if is_number(node.meta.get("val"))]
        for part in parts:
            self._tell(part)
        if self._name(value):
            self.told.append(number)
