"""Private names of tensors whose sizes are symbols, and the versions tried; not 2.15.0 yet.

| name | tried on |
| --- | --- |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.13.0, 2.14.1 |
| torch.fx.experimental.symbolic_shapes.ShapeEnv, DimDynamic, StatelessSymbolicContext | 2.13.0, 2.14.1 |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.13.0, 2.14.1 |
| torch.utils._sympy.functions.FloorDiv, Mod, PythonMod | 2.13.0, 2.14.1 |
| FakeTensorMode.from_tensor, SymBool.__bool__, torch._dynamo.source.ConstantSource | 2.13.0, 2.14.1 |
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch

from torch2ort.support.replaced import replaced
from torch2ort.support.versions import private_names

with private_names("torch"):
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        GuardOnDataDependentSymNode,
        ShapeEnv,
        StatelessSymbolicContext,
    )
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

READS_DATA = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Errors raised where code reads a value out of a fake tensor."""


@contextlib.contextmanager
def symbolic(tensors: Sequence[torch.Tensor], *, any_size: bool) -> Iterator[Sequence[torch.Tensor]]:
    """Context that yields fake tensors like others, from which no number can be read.

    Args:
        tensors: the others.
        any_size: True to make each size but 0 and 1 a symbol of its own; else all sizes are numbers.
    """
    environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    kind = DimDynamic.DYNAMIC if any_size else DimDynamic.STATIC
    made = []
    for i, tensor in enumerate(tensors):
        sizes = [kind if size > 1 else DimDynamic.STATIC for size in tensor.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"tensor_{i}")
        made.append(mode.from_tensor(tensor.detach(), symbolic_context=context, source=source))
    with mode:
        yield made


def fixes_a_size(condition: bool | torch.SymBool) -> bool:
    """Return True if a condition on sizes fixes a size to one number, or makes two sizes equal."""
    if isinstance(condition, bool):
        return not condition
    expression = condition.node.expr
    return isinstance(expression, sympy.Eq) and not expression.has(FloorDiv, Mod, PythonMod)


def sizes_decide(refuse: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Context in which ``refuse`` is called where Python code converts a condition on sizes to a bool."""
    decide = torch.SymBool.__bool__
    asking = threading.get_ident()

    def decided(self: torch.SymBool) -> bool:
        if threading.get_ident() == asking and self.node.expr.free_symbols:
            refuse()
        return bool(decide(self))

    return replaced(torch.SymBool, __bool__=decided)
