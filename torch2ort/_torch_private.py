"""Every private name of torch that the package's top level touches, with the versions tried.

| name | tried on |
| --- | --- |
| ExportedProgram._guards_code | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.11-2.15.0 |
| torch._C._autograd._get_current_graph_task_keep_graph | 2.11-2.15.0 |
| torch.nn.modules.batchnorm._BatchNorm | 2.11-2.15.0 |
| torch.Tensor._version | 2.11-2.15.0 |
"""

from __future__ import annotations

import torch

from torch2ort.versions import need, private_names

with private_names("torch"):
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

    need(torch.Tensor, "_version")
    need(torch.export.ExportedProgram, "_guards_code")
    need(torch._C._autograd, "_get_current_graph_task_keep_graph")

__all__ = ["DATA_DEPENDENT", "BatchNorm", "backward_keeps_graph", "size_guards", "version_of"]

# Raised where Python code of the model needs the value of a tensor: a branch, `.item()`, `int(tensor)`.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def size_guards(program: torch.export.ExportedProgram) -> list[str]:
    """Conditions on sizes that tracing relied on, as Python expressions over ``L['name'][i].size()[j]``."""
    return list(program._guards_code)


def backward_keeps_graph() -> bool:
    """Whether the backward now running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """Counter that every in-place write to ``tensor`` raises."""
    return int(tensor._version)
