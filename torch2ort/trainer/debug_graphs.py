"""The graphs of a trainer: the model as an ONNX file, and the files of debug options."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import onnx
import torch

from torch2ort import ExportedModel, ExportError, OptionError, TrainerNotStartedError, export
from torch2ort.export import export_unfolded
from torch2ort.trainer.model_desc import ModelDesc
from torch2ort.trainer.model_with_loss import WholeModel
from torch2ort.trainer.onnx_model.model import OnnxModel
from torch2ort.trainer.onnx_model.weights import TRAINED
from torch2ort.trainer.optimizer_step import Update
from torch2ort.trainer.options import ORTTrainerOptions
from torch2ort.trainer.training_graph import optimized, training_graph


class Graphs:
    """The graphs of a trainer that are written to files.

    Args:
        whole: the model with its loss.
        description: the description of its inputs and outputs.
        options: the trainer's.

    Raises:
        OptionError: a graph is not available, or its folder does not exist.

    Attributes:
        sample: the inputs of the last step; ``None`` before the first.
        folder: the folder to which ORTModule writes its graphs; ``None`` for none.
    """

    def __init__(
        self, whole: WholeModel | OnnxModel, description: ModelDesc, options: ORTTrainerOptions
    ) -> None:
        self._whole, self._description, self._options = whole, description, options
        self.sample: tuple[torch.Tensor, ...] | None = None
        self._wanted = {name: Path(path) for name, path in options.debug.graph_save_paths if path}
        for name, path in self._wanted.items():
            _refuse_path(name, path)
        # The folder lives as long as the trainer, as later graphs are written to it, too.
        self._temporary = tempfile.TemporaryDirectory(prefix="torch2ort_trainer_") if self._wanted else None
        self.folder = self._temporary.name if self._temporary is not None else None

    def before_training(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Record a step's inputs; before the first step, compare the models if the options ask for it."""
        if self.sample is None:
            if isinstance(self._whole, OnnxModel) and not self._whole.draws:
                self._whole.check(inputs)
            if self._options.debug.check_model_export:
                self._check_export(inputs)
        self.sample = inputs

    def before_update(self, update: Update) -> None:
        """Write the first training step with its update to the paths in the options."""
        paths = [self._wanted.pop(name, None) for name in _WHOLE_STEP]
        if not any(paths) or self.sample is None:
            return
        model = training_graph(self._whole, self._description.loss_position(), update, self.sample)
        if paths[0] is not None:
            onnx.save(model, paths[0])
        if paths[1] is not None:
            optimized(model, paths[1])

    def after_training(self) -> None:
        """Write the graphs of the first training step to the paths in the options."""
        if self.folder is None or not self._wanted:
            return
        written = sorted(Path(self.folder).glob("*.onnx"))
        for name, path in self._wanted.items():
            for stage, suffix in _STAGES[name]:
                found = [one for one in written if one.stem.endswith(stage)]
                if found:
                    shutil.copyfile(found[0], path.with_name(f"{path.stem}{suffix}{path.suffix}"))
        self._wanted = {}

    def save(self, path: str) -> None:
        """Write the model as an ONNX file; see ``ORTTrainer.save_as_onnx``."""
        if self.sample is None:
            raise TrainerNotStartedError(
                "save_as_onnx needs a train_step or eval_step before it, by whose inputs the model is "
                "exported."
            )
        if not isinstance(path, str) or not Path(path).name or not Path(path).absolute().parent.is_dir():
            raise OptionError(f"path is {path!r}; allowed is the path of a file in a folder that exists.")
        if Path(path).is_dir():
            raise OptionError(f"path is {path!r}, a folder; allowed is the path of a file.")
        if isinstance(self._whole, OnnxModel):
            onnx.save(self._whole.proto(), path)
        else:
            self.model(self.sample).save(path)

    def model(self, sample: tuple[torch.Tensor, ...]) -> ExportedModel:
        """Return the model in evaluation mode, with its present weights and the description's names.

        Args:
            sample: inputs of a step.
        """
        exported = self._export(sample)
        graph, names = exported.proto.graph, {}
        for one in graph.initializer:
            names[one.name] = self._whole.public_name(one.name)
        for old, described in zip(graph.output, self._description.outputs, strict=True):
            names[old.name] = described.name
        # After the outputs: an output that is an input has the input's name. State follows the inputs.
        for value, one in zip(graph.input, self._description.inputs, strict=False):
            names[value.name] = one.name
        parameters = {names[name] for name, _ in self._whole.named_parameters() if name in names}
        changed = {old: new for old, new in names.items() if old != new}
        return exported.renamed(changed, dict.fromkeys(parameters, TRAINED))

    def _export(self, sample: tuple[torch.Tensor, ...]) -> ExportedModel:
        """Export the model with the described sizes, and with bounds on them where the model has bounds."""
        names = {size for one in self._description.inputs for size in one.shape if isinstance(size, str)}
        named = {name: torch.export.Dim(re.sub(r"\W", "_", name)) for name in names}
        try:
            return self._export_with(sample, named)
        except ExportError:
            # The model bounds a size, as by a table's size, or needs a multiple: AUTO finds such conditions.
            exported = self._export_with(sample, dict.fromkeys(names, torch.export.Dim.AUTO))
        for described, value in zip(self._description.inputs, exported.proto.graph.input, strict=False):
            dimensions = value.type.tensor_type.shape.dim
            fixed = [
                (size, one.dim_value)
                for size, one in zip(described.shape, dimensions, strict=True)
                if size in names and one.HasField("dim_value")
            ]
            if fixed:
                raise ExportError(
                    f"The size {fixed[0][0]!r} of the input {described.name!r} does not vary: the model "
                    f"holds for {fixed[0][1]} alone. Describe it as {fixed[0][1]}."
                )
        return exported

    def _export_with(self, sample: tuple[torch.Tensor, ...], sizes: dict[str, Any]) -> ExportedModel:
        """Export the model in evaluation mode with these kinds of sizes, by name."""
        shapes = tuple(
            {axis: sizes[size] for axis, size in enumerate(one.shape) if isinstance(size, str)}
            for one in self._description.inputs
        )
        return export_unfolded(self._whole, sample, {"inputs": shapes})

    def _check_export(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Compare the exported model's outputs with PyTorch's, both in evaluation mode.

        Raises:
            ExportError: they differ.
        """
        training = self._whole.training
        self._whole.eval()
        try:
            with torch.no_grad():
                expected = self._whole(*inputs)
            given = export(self._whole, inputs, training=False)(*inputs)
        finally:
            self._whole.train(training)
        for one, ours, theirs in zip(self._description.outputs, given, expected, strict=True):
            if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-5, equal_nan=True):
                raise ExportError(
                    f"Option debug.check_model_export: output {one.name!r} of the exported model differs "
                    f"from "
                    f"PyTorch's by up to {(ours - theirs).abs().max().item():.3g}; report it, or if the "
                    f"model draws "
                    f"random numbers in evaluation mode, leave the option out."
                )


# Option -> the stages of an ORTModule's graphs that its path is for, and the suffixes of the files' names. A
# step has a forward and a backward graph.
_STAGES = {
    "model_after_graph_transforms_path": [("_exported", "")],
    "model_with_gradient_graph_path": [("_gradient", ""), ("_backward", ""), ("_forward", "_forward")],
}


_WHOLE_STEP = ("model_with_training_graph_path", "model_with_training_graph_after_optimization_path")


def _refuse_path(name: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise OptionError(
            f"Option debug.graph_save_paths.{name} is {str(path)!r}; allowed is a file in a folder that "
            f"exists."
        )
