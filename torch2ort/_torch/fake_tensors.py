"""Private names of tensors without data, and the versions tried.

| name | tried on |
| --- | --- |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
| torch._subclasses.functional_tensor.FunctionalTensor | 2.13.0 |
| torch.fx.experimental.symbolic_shapes.statically_known_true | 2.13.0 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from torch2ort.support.versions import private_names

with private_names("torch"):
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor

if TYPE_CHECKING:
    import sympy

# The types that replace a tensor in a trace.
TRACED_TENSORS = (FakeTensor, FunctionalTensor)
# The sizes that an export allows to be 0, while a program is decomposed.
_may_be_zero: ContextVar[frozenset[sympy.Symbol]] = ContextVar("_may_be_zero", default=frozenset())


@contextmanager
def sizes_of_zero(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Context in which :func:`is_never_zero` knows the bounds of this program's sizes."""
    least = {symbol: bounds.lower for symbol, bounds in program.range_constraints.items()}
    token = _may_be_zero.set(frozenset(symbol for symbol, lower in least.items() if lower < 1))
    try:
        yield
    finally:
        _may_be_zero.reset(token)


def fake_mode(graph: torch.fx.Graph) -> FakeTensorMode | None:
    """Return the mode in which the values of a program were traced; ``None`` if it has no tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return True if ``condition`` holds for every size; False also where this is unknown."""
    return bool(_statically_known_true()(condition))


@functools.cache
def _statically_known_true() -> Callable[[bool | torch.SymBool], bool]:
    """Import torch's function when needed: sympy is slow to import, and a cached start needs neither."""
    with private_names("torch"):
        from torch.fx.experimental.symbolic_shapes import statically_known_true
    return statically_known_true


def is_never_zero(size: int | torch.SymInt) -> bool:
    """Return True if a size in a decomposition is never 0 in the bounds of the export.

    A trace assumes that symbolic sizes are 2 or more, whatever their bounds.
    """
    if isinstance(size, int):
        return size > 0
    return is_known(size > 0) and _may_be_zero.get().isdisjoint(size.node.expr.free_symbols)
