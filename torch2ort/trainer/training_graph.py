"""A whole step of a trainer as one ONNX graph, for inspection: forward, gradients and the weight update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch

from torch2ort import export_training
from torch2ort.trainer.model_with_loss import WholeModel
from torch2ort.trainer.onnx_model.model import OnnxModel
from torch2ort.trainer.optimizer_step import Tensors, Update


class _LossFirst(torch.nn.Module):
    """A module that returns the loss first, as an export of a step requires."""

    def __init__(self, whole: WholeModel | OnnxModel, loss: int) -> None:
        super().__init__()
        self.whole = whole
        self.loss = loss

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.whole(*inputs)
        return (outputs[self.loss], *outputs)


class _Named:
    """An update that calls the weights by the user's names."""

    def __init__(self, update: Update, whole: WholeModel | OnnxModel) -> None:
        self.lr = update.lr
        self._update, self._whole = update, whole

    def init(self, parameters: Tensors) -> dict[str, Any]:
        return self._back(self._update.init(self._public(parameters)), parameters)

    def __call__(
        self, parameters: Tensors, gradients: Tensors, state: Mapping[str, Any], lr: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        public = {k: self._public(v) if isinstance(v, Mapping) else v for k, v in state.items()}
        updated, new = self._update(self._public(parameters), self._public(gradients), public, lr)
        return self._private(updated, parameters), self._back(new, parameters)

    def _public(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in values.items()}

    def _name(self, name: str) -> str:
        return self._whole.public_name(name.removeprefix("whole."))

    def _private(self, values: Mapping[str, Any], parameters: Tensors) -> dict[str, Any]:
        names = {self._name(name): name for name in parameters}
        return {names[name]: value for name, value in values.items()}

    def _back(self, state: Mapping[str, Any], parameters: Tensors) -> dict[str, Any]:
        return {
            key: self._private(value, parameters) if isinstance(value, Mapping) else value
            for key, value in state.items()
        }


def training_graph(
    whole: WholeModel | OnnxModel, loss: int, update: Update, inputs: tuple[torch.Tensor, ...]
) -> onnx.ModelProto:
    """Return a step as a graph from inputs, weights and optimizer state to loss, weights and state.

    Args:
        whole: the model with its loss, in its mode of training.
        loss: position of the loss among its outputs.
        update: the update of the weights.
        inputs: the inputs of a step, which determine the sizes of the graph.

    Raises:
        ExportError: the step cannot be exported as plain ONNX; the error names the reason.
    """
    module = _LossFirst(whole, loss).train(whole.training)
    return export_training(module, inputs, optimizer=_Named(update, whole)).models["train_step.onnx"]


def optimized(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph in the form that ONNX Runtime runs, after its optimizations.

    Args:
        model: the graph.
        path: the file.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
