"""An ONNX model that is trained: its module, the model with new weights, and a comparison of the two."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.numpy_helper
import torch

from torch2ort import ExportError, OptionError
from torch2ort.trainer.model_desc import ModelDesc
from torch2ort.trainer.onnx_model.onnx_to_torch import build, current
from torch2ort.trainer.onnx_model.weights import Weights

# Tolerances between two libraries' float32 results of the same model.
_RTOL, _ATOL = 1e-3, 1e-4


class OnnxModel(torch.nn.Module):
    """A module from an ONNX model's inputs, in order, to the described outputs.

    Args:
        model: the model; it is not changed.
        description: names all inputs of the model, and outputs, in order.

    Raises:
        OptionError: the description does not match the model.
        UnsupportedOperatorError: a node cannot be trained; the error names the first one.
    """

    def __init__(self, model: onnx.ModelProto, description: ModelDesc) -> None:
        super().__init__()
        _check_names(model, description)
        self._original = model.SerializeToString()
        self._outputs = [one.name for one in description.outputs]
        converted = current(model)
        weights = Weights(converted)
        self.body = build(converted, weights, self._outputs)
        self._names = dict(weights.attributes)
        self.draws = any(type(one).__name__ == "Dropout" for one in self.body.children())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the described outputs."""
        found: tuple[torch.Tensor, ...] = self.body(*inputs)
        return found

    def public_name(self, name: str) -> str:
        """Return the name of the initializer of the parameter or buffer `name` of this module."""
        attribute = name.rpartition(".")[2]
        return next((known for known, one in self._names.items() if one == attribute), name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the floating-point initializers, without copies, by their names."""
        weights = self.body.get_submodule("weights")
        return {name: getattr(weights, attribute) for name, attribute in self._names.items()}

    def proto(self) -> onnx.ModelProto:
        """Return the ONNX model with the present weights."""
        model = onnx.ModelProto()
        model.ParseFromString(self._original)
        values = self.tensors()
        for initializer in model.graph.initializer:
            if initializer.name in values:
                value = values[initializer.name].detach().cpu().numpy()
                new = onnx.numpy_helper.from_array(value, initializer.name)
                new.doc_string = initializer.doc_string
                initializer.CopyFrom(new)
        return model

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Compare this module's outputs with those of the original model in ONNX Runtime.

        Args:
            inputs: the inputs of a step.

        Raises:
            ExportError: the outputs differ.
        """
        import onnxruntime

        model = self.proto()
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {
            one.name: value.cpu().numpy() for one, value in zip(session.get_inputs(), inputs, strict=False)
        }
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                ours = self(*inputs)
        finally:
            self.train(training)
        for name, one, value in zip(self._outputs, ours, session.run(self._outputs, feeds), strict=True):
            other = torch.from_numpy(value)
            if not torch.allclose(one.cpu(), other, rtol=_RTOL, atol=_ATOL, equal_nan=True):
                difference = (one.cpu().double() - other.double()).abs().max().item()
                raise ExportError(
                    f"Output {name!r} of the ONNX model differs from ONNX Runtime's by up to "
                    f"{difference:.3g} "
                    f"once its operators are PyTorch's. Give the torch.nn.Module that it was made of, "
                    f"and report it."
                )


def _check_names(model: onnx.ModelProto, description: ModelDesc) -> None:
    initial = {one.name for one in model.graph.initializer}
    inputs = [one.name for one in model.graph.input if one.name not in initial]
    described = [one.name for one in description.inputs]
    if inputs != described:
        raise OptionError(
            f"model_desc describes the inputs {described}; the ONNX model's are {inputs}. Describe all "
            f"of them, in "
            f"their order."
        )
    outputs = [one.name for one in model.graph.output]
    wanted = [one.name for one in description.outputs]
    if [name for name in outputs if name in wanted] != wanted:
        raise OptionError(
            f"model_desc describes the outputs {wanted}; the ONNX model's are {outputs}. Describe some "
            f"of them, in "
            f"their order."
        )
