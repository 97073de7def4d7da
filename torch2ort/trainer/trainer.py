"""ORTTrainer: the documented front end, built on ORTModule."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch

from torch2ort import OptionError, ORTModule, SchemaMismatchError, TrainerError
from torch2ort.trainer import checkpoint, state_layout
from torch2ort.trainer.amp.loss_scaler import DynamicLossScaler, LossScaler
from torch2ort.trainer.data_parallel import Processes
from torch2ort.trainer.debug_graphs import Graphs
from torch2ort.trainer.model_desc import ModelDesc, ModelDescription
from torch2ort.trainer.model_with_loss import WholeModel, whole_model
from torch2ort.trainer.onnx_model.model import OnnxModel
from torch2ort.trainer.optim.config import _OptimizerConfig
from torch2ort.trainer.optimizer_step import Update, finite
from torch2ort.trainer.options import OptionGroup, ORTTrainerOptions
from torch2ort.trainer.outputs import StepOutputs, outputs_of
from torch2ort.trainer.resolve_options import check_supported, device_of, module_options
from torch2ort.trainer.step_info import TrainStepInfo


class ORTTrainer:
    """A trainer of a model on ONNX Runtime: each step runs forward, backward and update.

    >>> import torch
    >>> from torch2ort.trainer import ORTTrainer, ORTTrainerOptions, optim
    >>> description = {
    ...     "inputs": [("input", ["batch", 4]), ("label", ["batch"])],
    ...     "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    ... }
    >>> trainer = ORTTrainer(
    ...     torch.nn.Linear(4, 3), description, optim.SGDConfig(lr=0.1), torch.nn.functional.cross_entropy,
    ...     ORTTrainerOptions({"device": {"id": "cpu"}}),
    ... )
    >>> x, y = torch.ones(2, 4), torch.tensor([0, 0])
    >>> losses = [trainer.train_step(x, y)[0].item() for _ in range(3)]
    >>> losses[0] > losses[1] > losses[2]
    True

    Args:
        model: a ``torch.nn.Module``, whose weights are trained in place; or an ``onnx.ModelProto``, which is
            not changed.
        model_desc: ``{"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}``, see
            :class:`~torch2ort.trainer.model_desc.ModelDesc`, or a :class:`ModelDescription`. The names of
            inputs are those of ``forward``'s arguments, or of the ONNX model's inputs.
        optim_config: an ``AdamConfig``, ``LambConfig`` or ``SGDConfig``.
        loss_fn: computes the loss from the outputs of `model` and the last input; the loss becomes the first
            output. ``None`` where the model returns its loss itself.
        options: see :class:`ORTTrainerOptions`.

    Raises:
        OptionError: a ``ValueError``: an argument has the wrong type, arguments do not match each other, or
            an option is not supported.
        UnsupportedOperatorError: an ONNX model has an operator that cannot be trained.
    """

    def __init__(
        self,
        model: torch.nn.Module | onnx.ModelProto,
        model_desc: Mapping[str, Any] | ModelDescription,
        optim_config: _OptimizerConfig,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        _check_arguments(model, optim_config, loss_fn, options)
        self.options = _with_scaler(ORTTrainerOptions() if options is None else options)
        check_supported(self.options)
        self.model_desc = ModelDesc(model_desc)
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self._train_step_info = TrainStepInfo(optim_config)
        self._processes = Processes(self.options)
        self._device = device_of(self.options)
        self._scaler: LossScaler | None = self.options.mixed_precision.loss_scaler
        self._loss = self.model_desc.loss_position()
        self._whole = self._made_whole(model).to(self._device)
        self._parameters = self._trained_parameters()
        self._processes.start_with(self._whole.tensors())
        self._processes.watch(self._parameters, self._is_last_backward)
        self._owners = self._processes.owners(self._parameters)
        owned = {n: p for n, p in self._parameters.items() if self._owners[n] == self._processes.rank}
        clips = self.options.utils.grad_norm_clip
        self._update = Update(optim_config, self._parameters, owned, clips=clips)
        self._graphs = Graphs(self._whole, self.model_desc, self.options)
        self._module = ORTModule(self._whole, options=module_options(self.options, self._graphs.folder))

    def train_step(
        self, *args: torch.Tensor, fetches: Sequence[str] | None = None, **kwargs: torch.Tensor
    ) -> StepOutputs:
        """Run forward and backward; every ``gradient_accumulation_steps`` calls, update the weights.

        Args:
            *args: inputs in the order of the description; or one list of all.
            fetches: names of the outputs to return; by default ``TrainStepInfo.fetches``, or all if that is
                empty.
            **kwargs: inputs by their names.

        Returns:
            The outputs as a list, detached; see :class:`~torch2ort.trainer.outputs.StepOutputs`. The loss is
            not scaled.

        Raises:
            SchemaMismatchError: inputs or outputs differ from the description; nothing is updated then.
            OptionError: `fetches` contains a name that no output has.
        """
        wanted = self._output_positions(fetches)
        inputs, sizes = self._inputs(args, kwargs)
        self._graphs.before_training(inputs)
        if not self._whole.training:
            self._module.train()
        self._graphs.before_update(self._update)
        with self._autocast():
            outputs = self._module(*inputs)
        self.model_desc.check_outputs(outputs, sizes)
        self._train_step_info.step += 1
        self._backward(outputs[self._loss])
        lr = self._learning_rate()
        if self._is_last_backward():
            self._apply(lr)
        self._graphs.after_training()
        return outputs_of(outputs[position] for position in wanted)

    def eval_step(
        self, *args: torch.Tensor, fetches: Sequence[str] | None = None, **kwargs: torch.Tensor
    ) -> StepOutputs:
        """Run the model in evaluation mode.

        Args:
            *args: inputs in the order of the description; or one list of all.
            fetches: names of the outputs to return; by default ``TrainStepInfo.fetches``, or all if that is
                empty.
            **kwargs: inputs by their names.

        Returns:
            The outputs as a list.

        Raises:
            SchemaMismatchError: inputs or outputs differ from the description.
            OptionError: `fetches` contains a name that no output has.
        """
        wanted = self._output_positions(fetches)
        inputs, sizes = self._inputs(args, kwargs)
        if self._whole.training:
            self._module.eval()
        with torch.no_grad(), self._autocast():
            outputs = self._module(*inputs)
        self.model_desc.check_outputs(outputs, sizes)
        self._graphs.sample = inputs
        return outputs_of(outputs[position] for position in wanted)

    def save_as_onnx(self, path: str) -> None:
        """Write the model with its present weights, in evaluation mode, as an ONNX file.

        Inputs, outputs and varying sizes have the description's names, weights those of the model.

        Args:
            path: path of the file; its folder must exist.

        Raises:
            TrainerNotStartedError: a ``RuntimeWarning``: there was no ``train_step`` or ``eval_step`` yet,
                whose inputs the export needs.
            OptionError: a ``ValueError``: `path` is no path of a file in a folder that exists.
            ExportError: the model cannot be exported with varying sizes, or in the requested opset.
        """
        self._graphs.save(path)

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Return weights, the optimizer's state, some options and the numbers of steps.

        Args:
            pytorch_format: return only the weights and buffers, in the form of the model's ``state_dict``.

        Returns:
            By default a dict with ``"model"``, ``"optimizer"``, ``"trainer_options"`` and
            ``"train_step_info"``. It also has ``"partition_info"`` where this process stores only a part of
            the optimizer's state, ``"loss_scaler"`` with mixed precision, and ``"accumulated_gradients"``
            between two updates. Tensors are NumPy arrays. All values are copies.
        """
        if pytorch_format:
            return {name: value.detach().cpu().clone() for name, value in self._whole.tensors().items()}
        found: dict[str, Any] = {
            state_layout.MODEL: {
                state_layout.FULL: {k: state_layout.array(v) for k, v in self._whole.tensors().items()}
            },
            state_layout.OPTIMIZER: state_layout.optimizer_state(
                self._update.state, counts_by_weight=self.optim_config.name == "AdamOptimizer"
            ),
            state_layout.OPTIONS: self._state_of_options(),
            state_layout.INFO: {
                "optimization_step": self._train_step_info.optimization_step,
                "step": self._train_step_info.step,
            },
        }
        if self._processes.partitions:
            mine = [name for name, owner in self._owners.items() if owner == self._processes.rank]
            found[state_layout.PARTITION] = {name: self._partition(name) for name in mine}
        if self._scaler is not None:
            found[state_layout.SCALER] = self._scaler.state_dict()
        accumulated = {
            n: state_layout.array(p.grad) for n, p in self._parameters.items() if p.grad is not None
        }
        if accumulated:
            found[state_layout.ACCUMULATED] = accumulated
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state that :meth:`state_dict` returned, completely or not at all.

        Args:
            state_dict: a state without ``pytorch_format``. Without an ``"optimizer"``, the optimizer's state
                is not changed.
            strict: raise an error for missing or unexpected names, of weights and of the optimizer's state.

        Raises:
            TrainerError: it is no such state, or one of another model or optimizer.
        """
        state_layout.check_layout(state_dict)
        if state_layout.MODEL not in state_dict or state_layout.FULL not in state_dict[state_layout.MODEL]:
            raise TrainerError(
                f"The state has {sorted(state_dict)}; expected what ORTTrainer.state_dict() returns, "
                f"with 'model'."
            )
        weights, present = state_dict[state_layout.MODEL][state_layout.FULL], self._whole.tensors()
        state_layout.check_keys("weights", weights, present, strict=strict)
        new = {
            k: state_layout.fitting(f"weight {k!r}", v, present[k])
            for k, v in weights.items()
            if k in present
        }
        optimizer = self._loaded_optimizer(state_dict, strict=strict)
        gradients = {
            name: state_layout.fitting(f"gradient of {name!r}", value, self._parameters[name])
            for name, value in state_dict.get(state_layout.ACCUMULATED, {}).items()
            if name in self._parameters
        }
        with torch.no_grad():
            for name, value in new.items():
                present[name].copy_(value)
        self._update.state = optimizer
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        info = state_dict.get(state_layout.INFO, {})
        self._train_step_info.optimization_step = int(info.get("optimization_step", 0))
        self._train_step_info.step = int(info.get("step", 0))
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict.get(state_layout.SCALER, {}))

    def save_checkpoint(
        self, path: Any, user_dict: Mapping[str, Any] | None = None, include_optimizer_states: bool = True
    ) -> None:
        """Write the state to a file that does not exist yet.

        Args:
            path: path of the file, one for each process; or a binary file object.
            user_dict: values that :meth:`load_checkpoint` returns: tensors, arrays, plain values, and dicts,
                lists and tuples of them.
            include_optimizer_states: True to include the optimizer's state.

        Raises:
            FileExistsError: there is a file at `path`.
            TrainerError: `user_dict` contains an object of another type.
        """
        found = self.state_dict()
        if not include_optimizer_states:
            for key in (state_layout.OPTIMIZER, state_layout.PARTITION, state_layout.ACCUMULATED):
                found.pop(key, None)
        checkpoint.save(path, found, {} if user_dict is None else user_dict)

    def load_checkpoint(self, *paths: Any, strict: bool = True) -> dict[str, Any]:
        """Load the state in a file, or in the files of several processes together.

        Args:
            *paths: paths of the files, in any order. If the number of processes is the same as when they were
                written, a process may read its own file alone.
            strict: see :meth:`load_state_dict`.

        Returns:
            The ``user_dict`` of the file with the lowest rank.

        Raises:
            TrainerError: a file is no trainer's, the files are not of one training, one is missing, or the
                state is of another model.
        """
        if not paths:
            raise TrainerError("load_checkpoint was given no file; expected one or more paths.")
        loaded = [checkpoint.load(path) for path in paths]
        first = min(range(len(loaded)), key=lambda i: loaded[i][0][state_layout.OPTIONS]["world_rank"])
        if len(loaded) == 1 and self._state_of_options() == loaded[0][0][state_layout.OPTIONS]:
            self.load_state_dict(loaded[0][0], strict=strict)
        else:
            names = [str(path) for path in paths]
            whole = checkpoint.joined([one[0] for one in loaded], names, self._parameters)
            self.load_state_dict(whole, strict=strict)
        return loaded[first][1]

    def _made_whole(self, model: torch.nn.Module | onnx.ModelProto) -> WholeModel | OnnxModel:
        """Build the module that takes the described inputs and returns the described outputs."""
        change = self.options._internal_use.extra_postprocess
        if isinstance(model, torch.nn.Module):
            if change is not None:
                raise OptionError(
                    "Option _internal_use.extra_postprocess is given with a torch.nn.Module; it changes an "
                    "ONNX model alone. Change the module, or what save_as_onnx writes."
                )
            return whole_model(model, self.loss_fn, self.model_desc)
        if change is not None:
            model = change(model)
            if not isinstance(model, onnx.ModelProto):
                raise OptionError(
                    f"Option _internal_use.extra_postprocess returned a {type(model).__name__}; allowed "
                    f"is an "
                    f"onnx.ModelProto."
                )
        if self.options.utils.run_symbolic_shape_infer:
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        return OnnxModel(model, self.model_desc)

    def _output_positions(self, fetches: Sequence[str] | None) -> list[int]:
        """Return the positions of the outputs to return."""
        names = self._train_step_info.fetches if fetches is None else fetches
        return self.model_desc.named_outputs(names) if names else list(range(len(self.model_desc.outputs)))

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
        """Return the inputs in order, on the device, and the varying sizes."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = args[0]
        names = [one.name for one in self.model_desc.inputs]
        given = dict(zip(names, args, strict=False))
        wrong = [
            *given.keys() & kwargs.keys(),
            *(kwargs.keys() - set(names)),
            *(set(names) - {*given, *kwargs}),
        ]
        if len(args) > len(names) or wrong:
            raise SchemaMismatchError(
                f"A step was given {len(args)} inputs by position and {sorted(kwargs)} by name; expected "
                f"each of {names} "
                f"once."
            )
        given.update(kwargs)
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                raise SchemaMismatchError(
                    f"input {name!r} is a {type(value).__name__}; expected a torch.Tensor."
                )
        tensors = tuple(given[name].to(self._device) for name in names)
        return tensors, self.model_desc.check_inputs(tensors)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.mixed_precision.enabled:
            return torch.autocast(self._device.type, dtype=torch.float16)
        return contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients; their sum is the mean over the calls between two updates."""
        if loss.numel() != 1:
            raise SchemaMismatchError(f"The loss has shape {list(loss.shape)}; expected a single number.")
        steps = self.options.batch.gradient_accumulation_steps
        part = loss / steps if steps > 1 else loss
        if self._scaler is not None:
            part = part * self._scaler.loss_scale
        part.sum().backward() if part.dim() else part.backward()

    def _is_last_backward(self) -> bool:
        """Return True if the present call ends with an update."""
        steps: int = self.options.batch.gradient_accumulation_steps
        return self._train_step_info.step % steps == 0

    def _learning_rate(self) -> float:
        if self.options.lr_scheduler is None:
            return self.optim_config.lr
        return float(self.options.lr_scheduler._step(self._train_step_info)[0])

    def _apply(self, lr: float) -> None:
        """Update the weights by the gradients, unless a gradient overflowed."""
        self._processes.reduce(self._parameters)
        info = self._train_step_info
        if self._scaler is not None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= self._scaler.loss_scale
            info.all_finite = self._processes.all_agree(finite(self._parameters), self._device)
        if self._scaler is None or info.all_finite:
            self._update.step(lr)
            self._processes.share(self._parameters, self._owners)
            info.optimization_step += 1
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._scaler is not None:
            self._scaler.update(info)

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights to train, by name; frozen weights no longer require gradients."""
        tensors = self._whole.tensors()
        frozen = self.options.utils.frozen_weights
        unknown = [name for name in frozen if name not in tensors]
        if unknown:
            raise OptionError(
                f"Option utils.frozen_weights names {unknown[0]!r}, which is no weight; allowed is some of "
                f"{', '.join(tensors)}."
            )
        for name in frozen:
            tensors[name].requires_grad_(False)
        named = {self._whole.public_name(name): p for name, p in self._whole.named_parameters()}
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            raise OptionError("All weights of the model are frozen; leave some to train.")
        return trained

    def _loaded_optimizer(self, given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Return the optimizer's state in a trainer's state."""
        if state_layout.OPTIMIZER not in given:
            return self._update.state
        name = given.get(state_layout.OPTIONS, {}).get("optimizer_name", self.optim_config.name)
        if name != self.optim_config.name:
            raise TrainerError(f"The state is of {name}; this trainer has {self.optim_config.name}.")
        optimizer = given[state_layout.OPTIMIZER]
        if not self._processes.partitions:
            present = [] if name == "SGDOptimizer" else list(self._parameters)
            state_layout.check_keys(
                "optimizer", optimizer.keys() - {state_layout.SHARED}, present, strict=strict
            )
        return state_layout.into_optimizer_state(optimizer, self._update.state, strict=strict)

    def _state_of_options(self) -> dict[str, Any]:
        distributed = self.options.distributed
        return {
            "mixed_precision": self.options.mixed_precision.enabled,
            "zero_stage": distributed.deepspeed_zero_optimization.stage,
            "world_rank": distributed.world_rank,
            "world_size": distributed.world_size,
            "optimizer_name": self.optim_config.name,
            "data_parallel_size": distributed.world_size,
            "horizontal_parallel_size": distributed.horizontal_parallel_size,
        }

    def _partition(self, name: str) -> dict[str, Any]:
        shape = torch.tensor(self._parameters[name].shape, dtype=torch.int64)
        return {"original_dim": state_layout.array(shape), "megatron_row_partition": -1}


def _with_scaler(options: ORTTrainerOptions) -> ORTTrainerOptions:
    """Return the options, with a loss scaler where mixed precision has none; `options` is not changed."""
    if not options.mixed_precision.enabled or options.mixed_precision.loss_scaler is not None:
        return options
    completed = copy.copy(options)
    group = OptionGroup({"enabled": True, "loss_scaler": DynamicLossScaler()})
    vars(completed)["mixed_precision"] = group
    return completed


def _check_arguments(model: Any, optim_config: Any, loss_fn: Any, options: Any) -> None:
    if not isinstance(model, (torch.nn.Module, onnx.ModelProto)):
        raise OptionError(
            f"model is a {type(model).__name__}; allowed is a torch.nn.Module or an onnx.ModelProto."
        )
    if not isinstance(optim_config, _OptimizerConfig):
        raise OptionError(
            f"optim_config is a {type(optim_config).__name__}; allowed is an AdamConfig, LambConfig or "
            f"SGDConfig."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn is a {type(loss_fn).__name__}; allowed is a function of two arguments, or None."
        )
    if loss_fn is not None and isinstance(model, onnx.ModelProto):
        raise OptionError(
            "loss_fn is given with an ONNX model; allowed is None, as the model has its loss as an output."
        )
    if options is not None and not isinstance(options, ORTTrainerOptions):
        raise OptionError(f"options is a {type(options).__name__}; allowed is an ORTTrainerOptions, or None.")
