"""Attributes of parameters, which tracing would lose.

torch.export replaces a model's parameters and buffers by tensors of its own. Libraries set attributes on the
originals: bitsandbytes stores the quantisation of a weight in one, and reads it in ``forward``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch


class TensorAttributes:
    """The attributes of a model's own tensors.

    Args:
        model: the model as the user made it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._found: dict[str, dict[str, Any]] = {
            name: dict(vars(tensor)) for name, tensor in _tensors(model) if vars(tensor)
        }

    def hang_on(self, model: torch.nn.Module) -> None:
        """Set the missing attributes on the current tensors of ``model``."""
        if not self._found:
            return
        for name, tensor in _tensors(model):
            for key, value in self._found.get(name, {}).items():
                if not hasattr(tensor, key):
                    setattr(tensor, key, _copied(value))


def _copied(value: Any) -> Any:
    """Return a copy, so writes of a traced forward do not reach the model, or the value if it has none."""
    try:
        return copy.copy(value)
    except Exception:
        # A process group, for example, which DeepSpeed sets as an attribute of parameters.
        return value


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
