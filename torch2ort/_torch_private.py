"""Every private name of torch that the package's top level touches, with the versions tried.

| name | tried on |
| --- | --- |
| ExportedProgram._guards_code | 2.13.0 |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.13.0 |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.13.0 |
| torch._dynamo.exc.UserError | 2.13.0 |
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# Raised where Python code of the model needs the value of a tensor: a branch, `.item()`, `int(tensor)`.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def size_guards(program: torch.export.ExportedProgram) -> list[str]:
    """Conditions on sizes that tracing relied on, as Python expressions over ``L['name'][i].size()[j]``."""
    return list(program._guards_code)
