"""The engines that the installed onnxruntime has."""

from __future__ import annotations

import copy

from torch import nn

import torch2ort
from torch2ort.errors import RuntimeNotFoundError


def names() -> list[str]:
    """The engines that can train here."""
    return list(on_each(nn.Identity()))


def on_each(model: nn.Module) -> dict[str, nn.Module]:
    """A copy of `model` on each engine that can train here, by the engine's name."""
    found = {}
    for engine in ("ort_training", "joint"):
        module = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(engine=engine))
        try:
            found[module.engine] = module
        except RuntimeNotFoundError:  # the installed onnxruntime does not have this one
            continue
    return found
