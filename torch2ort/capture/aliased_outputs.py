"""Outputs that are no new tensors: an argument, a parameter or buffer, or another output.

The caller may compare them by ``is`` and write to them, so the tensors themselves are returned; a graph could
only return copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# None for a new tensor; else its origin: ("input", position), ("weight", name) or ("output", position).
Origin = tuple[str, int | str] | None


def output_origins(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], model: torch.nn.Module
) -> tuple[Origin, ...]:
    """Return the origin of each of ``outputs``, the results of a call of ``model`` with ``inputs``."""
    known: dict[int, Origin] = {}
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        known[id(tensor)] = ("weight", name)
    for position, tensor in enumerate(inputs):
        known[id(tensor)] = ("input", position)
    found: list[Origin] = []
    for position, tensor in enumerate(outputs):
        found.append(known.get(id(tensor)))
        known.setdefault(id(tensor), ("output", position))
    return tuple(found)


def put_back(
    outputs: list[torch.Tensor],
    origins: Sequence[Origin],
    inputs: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Replace the graph's copies in ``outputs`` by the tensors themselves."""
    for position, origin in enumerate(origins):
        if origin is None:
            continue
        kind, where = origin
        if isinstance(where, str):
            outputs[position] = weights[where]
        else:
            outputs[position] = (inputs if kind == "input" else outputs)[where]
