"""Export of a PyTorch model to ONNX files that train it on any ONNX Runtime.

model + loss + sample ─ trace ─► forward and backward ─ optimizer ─► plain ONNX ─► TrainingArtifacts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort import optim
from torch2ort.artifacts import read_training_json as names
from torch2ort.artifacts.read_training_json import Description
from torch2ort.differentiate.symbolic_shapes import refuse_assumed_of_half
from torch2ort.errors import ExportError, OptionError
from torch2ort.log import apply_level
from torch2ort.options import Options, with_arguments
from torch2ort.pythonop import Site
from torch2ort.refuse_torch_onnx_calls import options_by_name
from torch2ort.training_artifacts import TrainingArtifacts
from torch2ort.training_files import training_models
from torch2ort.training_files import write_training_json as described
from torch2ort.training_files.arguments import check_arguments, check_results
from torch2ort.training_files.evaluation import without_gradients
from torch2ort.training_files.module_with_loss import Metrics, WithLoss
from torch2ort.training_files.onnx_target import plain_target
from torch2ort.training_files.sample_inputs import call_of, inputs_call
from torch2ort.training_files.traced_step import TracedStep, state_names, trace_step

# Files whose outputs have the names of loss and metrics.
_WITH_RESULTS = (names.TRAIN_STEP, names.TRAINING_MODEL, names.EVAL_MODEL)


@options_by_name
def export_training(
    model: torch.nn.Module,
    sample: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[..., Any] | None = None,
    trainable: Any = None,
    metrics: Metrics | None = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    options: Options | None = None,
) -> TrainingArtifacts:
    """Export a complete training step of ``model`` as ONNX graphs that any ONNX Runtime runs without PyTorch.

    The step is that of the model's current mode; evaluation is in evaluation mode.

    Args:
        model: any module that torch.export can trace (non-strict).
        sample: with ``loss`` a tuple of inputs and targets, else the inputs. Inputs are as for
            :func:`torch2ort.export`: a tuple of positional arguments, a dict of keyword arguments, or any
            other object as the only positional argument.
        loss: a function of outputs and targets that returns one number; ``None`` if the model's first output
            is its loss.
        optimizer: an optimizer of ``torch2ort.optim``, or a function ``(parameters, gradients, state, lr) ->
            (parameters, state)`` of dicts of tensors. A function with state has an attribute
            ``init(parameters) -> state``; an attribute ``lr`` is its initial learning rate, 0.001 without
            one. ``AdamW(lr=1e-3)`` by default.
        trainable: the parameters to train: a name, a glob or several of them over the names of the
            ``state_dict``, or a predicate; others become constants. By default those that require a gradient.
        metrics: name -> function of outputs and targets (only of outputs without ``loss``) that returns a
            tensor.
        dynamic_shapes: as for ``torch.export.export``, of ``(inputs, targets)`` with ``loss``; ``None`` fixes
            every size to that of the sample.
        opset: ONNX opset, from 18 to the highest that the installed onnx and onnxruntime both support; 18 by
            default.
        options: further settings.

    Raises:
        ExportError: the model, its loss or its optimizer cannot be exported; the message names the place and
            the reason.
        UnsupportedOperatorError: an operator has no translation to ONNX's own operators.
        SchemaError: the sample or an output is of a kind that cannot be flattened.
        OptionError: an option is not allowed.
    """
    options = with_arguments(options, opset=opset)
    apply_level(options)
    check_arguments(model, loss, optimizer, metrics)
    chosen = optim.AdamW() if optimizer is None else optimizer
    results = ["loss", *(metrics or {})]
    wrapped = WithLoss(model, loss, metrics or {})
    call, structure = call_of(model, sample, dynamic_shapes, has_loss=loss is not None)
    trained = _trained(wrapped, trainable)
    if isinstance(chosen, optim.Optimizer):
        chosen.check_names(_parameter_names(wrapped))
    step = trace_step(wrapped, call, trained, options)
    _refuse_untrained(step, wrapped.model)
    state = _Start(step, chosen)
    functions: dict[str, Site] = {}
    target = plain_target(options.opset, is_step=True, training=wrapped.training)
    models = training_models.of_training(step, results[1:], chosen, state.optimizer, target, functions)
    refuse_assumed_of_half(step.joint.graph_module.graph, is_forward=False)
    known = state_names(model, wrapped)
    models[names.EVAL_MODEL], evaluated, _ = without_gradients(
        wrapped, call, known, state.model, results, options, functions
    )
    check_results({name: models[name] for name in _WITH_RESULTS}, results)
    alone = inputs_call(model, sample, dynamic_shapes, has_loss=loss is not None)
    models[names.INFERENCE_MODEL], inferred, outputs = without_gradients(
        model, alone, known, state.model, None, options, functions
    )
    sums = {name: training_models.accumulated(name) for name in training_models.reached_names(step)}
    description = Description(
        batch=structure,
        inputs=described.batch(step),
        ranges=described.ranges(step),
        guards=described.guards(step),
        results=results,
        parameters={name: described.fixed(value) for name, value in state.parameters.items()},
        buffers={name: described.fixed(value) for name, value in state.buffers.items()},
        optimizer={name: described.fixed(value) for name, value in state.flat.items()},
        gradients=sums,
        evaluated={names.EVAL_MODEL: evaluated, names.INFERENCE_MODEL: inferred},
        aliases=described.aliases(wrapped, state.model),
        feeds=described.feeds(models, sums),
        learning_rate=float(getattr(chosen, "lr", 1e-3)),
        seeded=described.is_seeded(models[names.TRAIN_STEP], functions),
        functions=described.function_names(functions),
        outputs=outputs,
    )
    return TrainingArtifacts(models, described.numpy_of({**state.model, **state.flat}), description)


class _Start:
    """The initial state of a training.

    Attributes:
        parameters: the trained parameters, by their names in the ``state_dict``.
        buffers: the buffers that a step changes.
        model: both.
        optimizer: the optimizer's state, as its ``init`` returned it.
        flat: the optimizer's state by its names in a checkpoint.
    """

    def __init__(self, step: TracedStep, optimizer: Callable[..., Any]) -> None:
        self.parameters = self._values(step, "parameter")
        self.buffers = self._values(step, "buffer")
        self.model = {**self.parameters, **self.buffers}
        init = getattr(optimizer, "init", None)
        first = {} if init is None else init(self.parameters)
        if not isinstance(first, Mapping):
            raise ExportError(
                f"the optimizer's init returned a {type(first).__name__}; expected a dict, its initial state"
            )
        self.optimizer: dict[str, Any] = dict(first)
        self.flat = training_models.flat_state(self.optimizer)

    def _values(self, step: TracedStep, kind: str) -> dict[str, torch.Tensor]:
        found = described.of_kind(step, kind)
        return {given.name: given.value.detach().clone() for given in found if given.value is not None}


def _refuse_untrained(step: TracedStep, model: torch.nn.Module) -> None:
    if not training_models.reached_names(step):
        raise ExportError(
            f"the loss depends on none of the trained parameters of {type(model).__name__}: there is nothing "
            f"to train. Compute it from the model's outputs, without detach() or no_grad(), or train others"
        )


def _refuse_unmatched(trainable: Any, names: list[str]) -> None:
    """Refuse a name among several that matches no parameter; it is another error if none of them match."""
    if isinstance(trainable, str) or callable(trainable):
        return
    fitting = [one for one in trainable if any(map(optim.matcher(one), names))]
    missing = [one for one in trainable if one not in fitting]
    if fitting and missing:
        raise OptionError(
            f"trainable: {missing[0]!r} is not the name of a parameter; expected some of {sorted(names)}"
        )


def _parameter_names(wrapped: WithLoss) -> list[str]:
    return [_state_name(name) for name, _ in wrapped.named_parameters(remove_duplicate=False)]


def _state_name(name: str) -> str:
    return name.removeprefix("model.")


def _trained(wrapped: WithLoss, trainable: Any) -> frozenset[str]:
    """Return the names, in the wrapper, of the parameters to train.

    Raises:
        OptionError: no parameter is trained.
    """
    every = dict(wrapped.named_parameters(remove_duplicate=False))
    if trainable is None:
        found = {name for name, parameter in every.items() if parameter.requires_grad}
    else:
        holds = optim.matcher(trainable)
        found = {name for name in every if holds(_state_name(name))}
        _refuse_unmatched(trainable, _parameter_names(wrapped))
    if not found:
        raise OptionError(
            f"trainable={trainable!r}: no parameter of {type(wrapped.model).__name__} is trained; "
            f"expected some of {sorted(map(_state_name, every))}"
        )
    return frozenset(found)
