"""The weights of an ORTModule's graph, looked up in the model at each access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from torch2ort.cache.key.key import tensor_of
from torch2ort.errors import ExportError


class PresentWeights(Mapping[str, torch.Tensor]):
    """A graph's weights as they are in the model at each access.

    Args:
        model: the model.
        origins: graph input -> name of the model's tensor.
        constants: graph input -> tensor, for tensors that are neither parameters nor buffers of the model.
    """

    def __init__(
        self, model: torch.nn.Module, origins: Mapping[str, str], constants: Mapping[str, torch.Tensor]
    ) -> None:
        self._model = model
        self._origins = origins
        self._constants = constants

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor that is fed to the graph's input ``name``."""
        if name in self._constants:
            return self._constants[name]
        tensor = tensor_of(self._model, self._origins[name])
        if tensor is None:
            raise ExportError(
                f"{type(self._model).__name__}: this graph was exported when the model had a "
                f"tensor '{self._origins[name]}', which it has no longer. Call the module, and use its new "
                f"attribute 'exported'"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the graph's inputs that are weights."""
        return iter(self._origins)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._origins)
