"""Refusal of hooks on gradients inside of a model, which no graph calls."""

from __future__ import annotations

import torch

from torch2ort._torch import global_state as private
from torch2ort.errors import ExportError


def backward_hook(model: torch.nn.Module) -> str | None:
    """Describe the module below ``model`` with a hook on its gradients, or return ``None``."""
    if private.all_modules_have_backward_hooks():
        return "every module has a backward hook, by torch.nn.modules.module,"
    name: str
    for name, module in model.named_modules():
        if name and (module._backward_hooks or module._backward_pre_hooks):
            return f"its module '{name}' has a backward hook,"
    return None


def hook_refused(model: torch.nn.Module, what: str) -> ExportError:
    """Build the error for a hook on a gradient.

    Args:
        model: the model.
        what: the hook and its place, as :func:`backward_hook` describes it.
    """
    return ExportError(
        f"{type(model).__name__}: {what} which a graph cannot call. Hooks of the model itself and of its "
        f"parameters work; for others put the computation into the backward of a torch.autograd.Function"
    )
