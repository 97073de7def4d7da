"""Checks of the arguments of a training step's export, before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import torch

from torch2ort.errors import ExportError, OptionError


def check_arguments(model: Any, loss: Any, optimizer: Any, metrics: Any) -> None:
    """Check the types of the arguments.

    Raises:
        ExportError: the model is no torch.nn.Module.
        OptionError: another argument has the wrong type.
    """
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"export_training: expected a torch.nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise OptionError(f"loss={loss!r}: expected a function of outputs and targets, or None")
    if optimizer is not None and (isinstance(optimizer, type) or not callable(optimizer)):
        what = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise OptionError(
            f"optimizer={what}: expected one of torch2ort.optim, such as AdamW(lr=0.001), or a function "
            f"(parameters, gradients, state, lr) -> (parameters, state)"
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics={metrics!r}: expected a dict of functions by names")
    for name, function in (metrics or {}).items():
        if not isinstance(name, str) or not name or name == "loss" or not callable(function):
            raise OptionError(
                f"metrics[{name!r}] = {function!r}: expected a function, under a name that is not 'loss'"
            )


def check_results(models: Mapping[str, onnx.ModelProto], results: list[str]) -> None:
    """Check that no metric has the name of another tensor of the graphs, or a dtype without NumPy arrays.

    Raises:
        OptionError: there is such a metric.
    """
    for model in models.values():
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
        for name in results:
            if name not in types:
                raise name_taken(name)
            if types[name] == onnx.TensorProto.BFLOAT16:
                raise OptionError(
                    f"metrics[{name!r}] is torch.bfloat16, of which numpy has no arrays; convert it with "
                    f".float()"
                )


def name_taken(name: str) -> OptionError:
    """Return the error for a metric whose name another tensor has."""
    return OptionError(
        f"metrics[{name!r}]: a graph of the training step has that name for another tensor; give the metric "
        f"another one"
    )


def input_taken(name: str) -> ExportError:
    """Return the error for an argument of the model whose name another input has."""
    return ExportError(
        f"the model's argument {name!r} has the name of another input of the training step; give the "
        f"argument another name"
    )
