"""The outputs of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class StepOutputs(list):  # type: ignore[type-arg]
    """The outputs of a step, as a list in the order of the model's description.

    By the reference, a step returns a list; the trainer that it describes returned a single output as a
    tensor, and users' code relies on either. So a list of one tensor has that tensor's attributes, and is
    treated as the tensor by ``float()``, in format strings and by functions of torch.

    >>> outputs = StepOutputs([torch.tensor(0.5)])
    >>> outputs[0].item(), outputs.item(), f"{outputs:.2f}"
    (0.5, 0.5, '0.50')
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the single tensor."""
        return function(*map(_unwrapped, args), **{k: _unwrapped(v) for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if len(self) == 1 and not name.startswith("__"):
            return getattr(self[0], name)
        raise AttributeError(f"a step's {len(self)} outputs are a list, which has no attribute {name!r}")

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(self[0], spec) if len(self) == 1 else super().__format__(spec)


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, StepOutputs) and len(value) == 1 else value


def outputs_of(tensors: Iterable[torch.Tensor]) -> StepOutputs:
    """Return a step's outputs, detached from autograd's graph."""
    return StepOutputs(tensor.detach() for tensor in tensors)
