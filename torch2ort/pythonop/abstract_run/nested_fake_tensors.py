"""Tensors and sizes of a trace inside of a Function's argument, where a graph does not see them."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch import autograd_functions as private
from torch2ort.pythonop.abstract_run.object_snapshot import Snapshot


def find_unseen(path: str, argument: Any) -> str | None:
    """Find a tensor or a size of the trace inside of an argument that is not a tensor.

    Parameters and buffers of modules do not count: modules get their own tensors back after the trace.

    Args:
        path: name of the argument.
        argument: the argument.

    Returns:
        The path to the first tensor or size, and its kind; ``None`` if there is none.
    """
    found = _Held(path, argument).paths
    return found[0] if found else None


class _Held(Snapshot):
    def __init__(self, path: str, argument: Any) -> None:
        self.paths: list[str] = []
        self._tables: set[int] = set()
        super().__init__([(path, argument)])

    def _visit(self, path: str, value: Any) -> None:
        if id(value) in self._tables:
            return
        if isinstance(value, torch.nn.Module):
            self._tables |= {id(value._parameters), id(value._buffers)}
        elif isinstance(value, torch.Tensor) and private.is_fake(value):
            self.paths.append(f"{path} is a tensor")
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.paths.append(f"{path} is a number")
        super()._visit(path, value)
