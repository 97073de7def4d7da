"""A model with its loss and metrics as one module, whose outputs are the results of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.errors import ExportError

Metrics = Mapping[str, Callable[..., torch.Tensor]]


class WithLoss(torch.nn.Module):
    """A module that returns the loss and the metrics of a batch.

    Args:
        model: the model; its parameters have the prefix ``model.`` here.
        loss: a function of outputs and targets; ``None`` if the model returns its loss first.
        metrics: functions of outputs and targets, or of the outputs where there is no ``loss``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor] | None,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._metrics = dict(metrics)
        self.training = model.training
        if isinstance(loss, torch.nn.Module):
            self.training = self.training or loss.training

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return the loss and the metrics."""
        targets: tuple[Any, ...] = ()
        if self.loss is not None:
            inputs, target = args
            targets = (target,)
            outputs = call(self.model, inputs)
            loss = self.loss(outputs, target)
        else:
            outputs = self.model(*args, **kwargs)
            loss = _first(outputs)
        _check_loss(loss)
        with torch.no_grad():
            values = [self._metrics[name](_detached(outputs), *targets) for name in self._metrics]
        for name, value in zip(self._metrics, values, strict=True):
            if not isinstance(value, torch.Tensor):
                raise ExportError(f"metrics[{name!r}] gave a {type(value).__name__}; expected a tensor")
        return (loss, *(value.detach() for value in values))


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """Call a model with a sample, in the form that :func:`torch2ort.export` accepts."""
    if type(inputs) is tuple:
        return model(*inputs)
    return model(**inputs) if type(inputs) is dict else model(inputs)


def _first(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs["loss"] if "loss" in outputs else next(iter(outputs.values()), None)
    if isinstance(outputs, Sequence) and outputs:
        return outputs[0]
    return getattr(outputs, "loss", None)


def _check_loss(loss: Any) -> None:
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ExportError(
            f"the loss of a training step is {what}; expected a tensor of one floating point number. Give "
            f"loss=, a function of outputs and targets, or let the model return its loss first"
        )


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    tensors, schema = io_schema.flatten(value)
    return io_schema.unflatten([t.detach() for t in tensors], schema)
