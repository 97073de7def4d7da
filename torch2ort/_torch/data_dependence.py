"""Every private name of torch that torch2ort.training_files touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.11-2.15.0 |
"""

from __future__ import annotations

from torch2ort.support.versions import private_names

with private_names("torch"):
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["DATA_DEPENDENT"]

# Raised where Python code needs the value of a tensor: a branch, `.item()`, `int(tensor)`.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
