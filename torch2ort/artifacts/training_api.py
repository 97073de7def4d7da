"""The API of onnxruntime.training.api: the parts of a step separately, for accumulated gradients."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torch2ort.artifacts import read_training_json as files
from torch2ort.artifacts import scalar_arguments
from torch2ort.artifacts._onnxruntime import onnxruntime
from torch2ort.artifacts.batch import BatchReader
from torch2ort.artifacts.checkpoint import Progress, description_in, read_checkpoint, write_checkpoint
from torch2ort.artifacts.checkpoint_parameters import Parameters, Properties
from torch2ort.artifacts.model_sessions import OpenSession, SessionFactory
from torch2ort.artifacts.read_training_json import Description, read_description, read_model
from torch2ort.artifacts.stateful_session import BoundRun, DeviceTensors, device_of, first_values, on_device
from torch2ort.artifacts.write_inference_model import write_inference_model
from torch2ort.errors import OptionError, SchemaMismatchError


class CheckpointState:
    """Parameters, buffers and the optimizer's state of a training.

    Attributes:
        parameters: a view of the parameters: ``state.parameters["fc.weight"].data`` is an array, and can be
            set; ``.grad`` is the sum of its gradients.
        properties: numbers and texts of the user, which are stored in the file.
    """

    def __init__(self, folder: Path, description: Description, arrays: Any, progress: Progress) -> None:
        self.folder, self.description = folder, description
        self._arrays, self.progress = arrays, progress
        self._state: DeviceTensors | None = None
        self.parameters = Parameters(self)
        self.properties = Properties(progress.properties)
        self._gradients: DeviceTensors | None = None

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Read a checkpoint.

        Args:
            checkpoint_uri: the file, in any folder. A file without a description of its training step must be
                in the folder of the ``training.json`` that was saved with it.

        Raises:
            ModelLoadError: a file is missing or damaged, or the two files do not match.
        """
        path = Path(checkpoint_uri)
        description = description_in(path) or read_description(path.parent)
        start = Progress(0, 0, description.learning_rate)
        arrays, progress = read_checkpoint(path, description.state, description.aliases, start)
        return cls(path.parent, description, arrays, progress)

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = True,
    ) -> None:
        """Write a checkpoint.

        Args:
            state: the state to write.
            checkpoint_uri: the file.
            include_optimizer_state: whether to write the optimizer's current state; if not, its state before
                the first step is written.

        Raises:
            OSError: the file cannot be written.
            OptionError: the optimizer's state before the first step is not in the checkpoint's folder, and no
                :class:`Module` was made of ``state``.
        """
        arrays = state.arrays()
        if not include_optimizer_state:
            path = state.folder / files.CHECKPOINT
            if not path.exists():
                raise OptionError(
                    f"include_optimizer_state=False: the optimizer's state before the first step is in "
                    f"{files.CHECKPOINT} beside {files.TRAINING_MODEL}, and {path.parent} has none. Make a "
                    f"Module of the state first, which names that folder"
                )
            description = state.description
            first, _ = read_checkpoint(path, description.state, description.aliases, state.progress)
            arrays.update({name: first[name] for name in description.optimizer})
        progress = replace(state.progress, properties=dict(state.properties))
        write_checkpoint(checkpoint_uri, arrays, state.description, progress)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of all tensors."""
        if self._state is None:
            return {name: np.array(value) for name, value in self._arrays.items()}
        return self._state.arrays()

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor."""
        if self._state is None:
            return np.array(self._arrays[name])
        return np.array(self._state.values()[name].numpy())

    def gradient(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a copy of the sum of a parameter's gradients; ``None`` if there is none."""
        sums = {} if self._gradients is None else self._gradients.values()
        found = sums.get(self.description.gradients.get(name, ""))
        return None if found is None else np.array(found.numpy())

    def set(self, name: str, value: Any) -> None:
        """Set the value of a tensor.

        Raises:
            SchemaMismatchError: the value has another type or shape.
        """
        wanted = self.description.state[name]
        array = np.asarray(value)
        given = wanted.difference(array.dtype.name, array.shape)
        if given is not None:
            raise SchemaMismatchError(f"parameter {name!r}: expected {wanted}, given {given}")
        if self._state is None:
            self._arrays[name] = np.array(array)
        else:
            self._state.load({name: array})

    def on(self, device: str) -> DeviceTensors:
        """Move the tensors to a device, at the first call, and return them."""
        if self._state is None:
            self._state, self._arrays = DeviceTensors(self._arrays, device), {}
        return self._state


class Module:
    """Forward and backward, with gradients that are summed until :meth:`lazy_reset_grad`.

    Args:
        train_model_uri: ``training_model.onnx``.
        state: the checkpoint.
        eval_model_uri: ``eval_model.onnx``, for :meth:`eval`.
        device: ``"cpu"`` or ``"cuda"``.
        session_options: ``onnxruntime.SessionOptions``.

    Attributes:
        training: whether calls train; if not, they evaluate.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        self.training = True
        self._checkpoint, self._description = state, state.description
        if device not in _PROVIDERS:
            raise OptionError(f"device={device!r}: expected one of {sorted(_PROVIDERS)}")
        self._opener = SessionFactory(
            state.description,
            _PROVIDERS[device],
            session_options,
            (),
            lambda: (self._checkpoint.progress.seed, self._draws),
        )
        opened = self._opener.open(Path(train_model_uri), files.TRAINING_MODEL)
        state.folder = Path(train_model_uri).parent
        self.state = state.on(device_of(opened.session))
        gradients = {
            buffer: state.description.parameters[name] for name, buffer in state.description.gradients.items()
        }
        self.gradients = state._gradients = DeviceTensors(first_values(gradients), self.state.device)
        self._fresh = on_device(np.ones(1, np.bool_), self.state.device)
        self._seed = on_device(np.zeros(2, np.int64), self.state.device)
        self._draws = 0
        self._fresh_next = True
        self._reader = BatchReader(state.description)
        self._runs = {(i, j): self._run(opened, i, j) for i in range(2) for j in range(2)}
        self._eval = (
            None if eval_model_uri is None else self._opener.open(Path(eval_model_uri), files.EVAL_MODEL)
        )
        self.lazy_reset_grad()

    def _run(self, opened: OpenSession, state: int, gradients: int) -> BoundRun:
        read, sums = self.state.sets[state], self.gradients.sets[gradients]
        given = {**read, **sums, files.RESET: self._fresh, files.SEED: self._seed}
        feeds = self._description.feeds[files.TRAINING_MODEL]
        to = {**self.state.sets[1 - state], **self.gradients.sets[1 - gradients]}
        written = {output: to[name] for output, name in feeds.items()}
        return opened.run(given, written, self._description.results)

    def __call__(self, *batch: Any) -> Any:
        """Compute loss and metrics of a batch; in training, also add its gradients to the sums.

        Args:
            batch: inputs and targets, or only inputs, as in the sample; NumPy arrays, or all of them
                ``onnxruntime.OrtValue``.

        Returns:
            The loss, or a tuple of the loss and each metric: NumPy arrays, or ``OrtValue`` if the batch
            consists of these.

        Raises:
            SchemaMismatchError: the batch differs from the sample.
            EngineError: onnxruntime failed.
        """
        is_native = bool(batch) and all(isinstance(one, onnxruntime.OrtValue) for one in batch)
        if is_native:
            batch = tuple(one.numpy() for one in batch)
        arrays = self._reader.read(batch if len(batch) != 1 or _is_tuple(self._description) else batch[0])
        found = self._train(arrays) if self.training else self._evaluate(arrays)
        values = tuple(map(_native, found.values()) if is_native else found.values())
        return values[0] if len(values) == 1 else values

    def _train(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        if self._description.seeded:
            seed = np.array([self._checkpoint.progress.seed, self._draws], np.int64)
            self._seed.update_inplace(seed)
        found = self._runs[self.state.current, self.gradients.current].arrays(arrays)
        self.gradients.current ^= 1
        self._draws += 1
        if self._fresh_next:
            self._fresh.update_inplace(np.zeros(1, np.bool_))
            self._fresh_next = False
        self._take_buffers()
        return found

    def _take_buffers(self) -> None:
        """Copy the buffers that forward changed to the set that is read: the parameters stay in that set."""
        written, read = self.state.sets[1 - self.state.current], self.state.sets[self.state.current]
        for name in self._description.buffers:
            read[name].update_inplace(written[name].numpy())

    def _evaluate(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        if self._eval is None:
            raise OptionError("eval_model_uri=None: expected the path of eval_model.onnx, to evaluate with")
        return self._eval.run(self.state.values(), {}, self._description.results).arrays(arrays)

    def train(self, mode: bool = True) -> Module:
        """Set whether calls train."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Set that calls evaluate."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Reset the sums of gradients at the next call."""
        self._fresh.update_inplace(np.ones(1, np.bool_))
        self._fresh_next = True

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of the parameters; all of them are trained."""
        shapes = [one.shape for one in self._description.parameters.values()]
        return sum(int(np.prod([int(size) for size in shape])) for shape in shapes)

    def input_names(self) -> list[str]:
        """Return the names of the tensors of a batch, in its order."""
        return list(self._description.inputs)

    def output_names(self) -> list[str]:
        """Return the names of loss and metrics."""
        return list(self._description.results)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> onnxruntime.OrtValue:
        """Return a copy of all parameters as one vector; all of them are trained.

        Raises:
            OptionError: the parameters have several types.
        """
        arrays = [self._checkpoint.array(name) for name in self._description.parameters]
        types = sorted({array.dtype.name for array in arrays})
        if len(types) > 1:
            raise OptionError(f"get_contiguous_parameters: expected parameters of one type, given {types}")
        return _native(np.concatenate([array.ravel() for array in arrays]))

    def copy_buffer_to_parameters(self, buffer: onnxruntime.OrtValue, trainable_only: bool = True) -> None:
        """Set all parameters from one vector; all of them are trained.

        Args:
            buffer: as :meth:`get_contiguous_parameters` returns it.
            trainable_only: as there.

        Raises:
            SchemaMismatchError: the buffer has another type or size. No parameter is changed then.
        """
        row, wanted = buffer.numpy(), self.get_contiguous_parameters().numpy()
        if (row.shape, row.dtype) != (wanted.shape, wanted.dtype):
            raise SchemaMismatchError(
                f"buffer: expected {wanted.dtype} of shape {wanted.shape}, given {row.dtype} of shape "
                f"{row.shape}"
            )
        begin = 0
        for name in self._description.parameters:
            shape = self._checkpoint.array(name).shape
            end = begin + int(np.prod(shape))
            self._checkpoint.set(name, row[begin:end].reshape(shape))
            begin = end

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str] | None = None
    ) -> None:
        """Write the model with its current parameters to an ONNX file.

        Args:
            inference_model_uri: the file.
            graph_output_names: the model's outputs; only all of them are supported.

        Raises:
            OptionError: other outputs are requested.
            OSError: the file cannot be written.
        """
        outputs = self._description.outputs
        if graph_output_names is not None and sorted(graph_output_names) != sorted(outputs):
            raise OptionError(f"graph_output_names={list(graph_output_names)}: expected {outputs}")
        content = read_model(self._checkpoint.folder, files.INFERENCE_MODEL, self._description)
        values = self.state.values()
        names = self._description.evaluated[files.INFERENCE_MODEL]
        write_inference_model(inference_model_uri, content, {n: values[n].numpy() for n in names})


_PROVIDERS: dict[str, list[str]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}


def _native(value: np.ndarray[Any, Any]) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(value))


def _is_tuple(description: Description) -> bool:
    return "tuple" in description.batch


class Optimizer:
    """An optimizer that updates a module's parameters by its sums of gradients.

    Args:
        optimizer_uri: ``optimizer_model.onnx``.
        module: the module.

    Raises:
        ModelLoadError: the file is missing or damaged.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._module, description = module, module._description
        opened = module._opener.open(Path(optimizer_uri), files.OPTIMIZER_MODEL)
        progress = module._checkpoint.progress
        self._rate = on_device(np.array(progress.lr, np.float32), module.state.device)
        self._lr = progress.lr
        self._runs = {}
        for i in range(2):
            for j in range(2):
                given = {
                    **module.state.sets[i],
                    **module.gradients.sets[j],
                    files.LEARNING_RATE: self._rate,
                }
                to = module.state.sets[1 - i]
                feeds = description.feeds[files.OPTIMIZER_MODEL]
                written = {output: to[name] for output, name in feeds.items()}
                self._runs[i, j] = opened.run(given, written, ())

    def step(self) -> None:
        """Make one step with the current sums of gradients.

        Raises:
            EngineError: onnxruntime failed.
        """
        module = self._module
        self._runs[module.state.current, module.gradients.current]({})
        read, written = (module.state.sets[module.state.current ^ flip] for flip in (0, 1))
        for name in module._description.buffers:
            written[name].update_inplace(read[name].numpy())
        module.state.current ^= 1
        progress = module._checkpoint.progress
        module._checkpoint.progress = replace(progress, step=progress.step + 1, lr=self._lr)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps.

        Raises:
            OptionError: it is negative or not a number.
        """
        self._lr = scalar_arguments.learning_rate("learning_rate", learning_rate)
        self._rate.update_inplace(np.array(self._lr, np.float32))

    def get_learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._lr


class LinearLRScheduler:
    """A scheduler that raises the learning rate linearly from zero, then lowers it linearly to zero.

    Args:
        optimizer: the optimizer whose learning rate it sets.
        warmup_step_count: number of steps in which the rate rises from zero.
        total_step_count: the step from which the rate is zero.
        initial_lr: the maximum of the rate.

    Raises:
        OptionError: ``total_step_count`` is not above ``warmup_step_count``, a number is not an integer, or
            the rate is not in the range of float32.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        counts = all(isinstance(one, numbers.Integral) for one in (warmup_step_count, total_step_count))
        if not counts or not 0 <= warmup_step_count < total_step_count:
            raise OptionError(
                f"warmup_step_count={warmup_step_count!r}: expected a number from 0 to below "
                f"total_step_count={total_step_count!r}"
            )
        self._optimizer, self._warmup, self._total = optimizer, warmup_step_count, total_step_count
        self._top, self._steps = scalar_arguments.learning_rate("initial_lr", initial_lr), 0
        self._set()

    def step(self) -> None:
        """Advance by one step; call it after each step of the optimizer."""
        self._steps += 1
        self._set()

    def _set(self) -> None:
        if self._steps < self._warmup:
            part = self._steps / self._warmup
        else:
            part = max(0.0, (self._total - self._steps) / (self._total - self._warmup))
        self._optimizer.set_learning_rate(self._top * part)
