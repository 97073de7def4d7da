"""What libraries hang on parameters: attributes of the tensor object that tracing would lose.

torch.export puts tensors of its own in the place of a model's parameters and buffers. bitsandbytes, for one,
keeps how a weight is quantised in an attribute of the parameter, and reads it in ``forward``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch


class TensorAttributes:
    """The attributes of a model's own tensors.

    Args:
        model: as the user made it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._found: dict[str, dict[str, Any]] = {
            name: dict(vars(tensor)) for name, tensor in _tensors(model) if vars(tensor)
        }

    def hang_on(self, model: torch.nn.Module) -> None:
        """Give the tensors that stand in ``model`` now the attributes that they lack."""
        if not self._found:
            return
        for name, tensor in _tensors(model):
            for key, value in self._found.get(name, {}).items():
                if not hasattr(tensor, key):
                    setattr(tensor, key, _copied(value))


def _copied(value: Any) -> Any:
    """A copy, for what a traced forward writes into it must not reach the model; some things have none."""
    try:
        return copy.copy(value)
    except Exception:
        # A process group, for one, which DeepSpeed hangs on parameters.
        return value


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
