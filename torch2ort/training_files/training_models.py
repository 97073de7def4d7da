"""The ONNX files of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch

from torch2ort._torch.export import DATA_DEPENDENT
from torch2ort.artifacts.read_training_json import OPTIMIZER_MODEL, TRAIN_STEP, TRAINING_MODEL
from torch2ort.errors import ExportError
from torch2ort.program.target import Target
from torch2ort.pythonop import Site
from torch2ort.training_files.arguments import name_taken
from torch2ort.training_files.concat_graphs import joined
from torch2ort.training_files.lowered_step import Part, lower_step
from torch2ort.training_files.step_graph import (
    LEARNING_RATE,
    RESET,
    SEED,
    StepGraph,
    add_step,
    draws,
    mode_of,
    place_inputs,
)
from torch2ort.training_files.traced_step import TracedStep

Optimizer = Callable[..., Any]


def updated(name: str) -> str:
    """Return the name of the output that becomes the input ``name`` of the next step."""
    return f"updated.{name}"


def accumulated(name: str) -> str:
    """Return the name of the input that is the sum of a parameter's gradients, as in ONNX Runtime's tools."""
    return f"{name}_grad.accumulation.buffer"


def flat_state(state: Mapping[str, Any], prefix: str = "optimizer.") -> dict[str, torch.Tensor]:
    """Flatten nested state to names of the form ``optimizer.<state>.<name>``.

    Raises:
        ExportError: a value in it is neither a tensor nor a dict with names.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise ExportError(f"the optimizer's state {prefix}{key} has the name {key!r}; expected a text")
        if isinstance(value, Mapping):
            found.update(flat_state(value, f"{prefix}{key}."))
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        else:
            raise ExportError(
                f"the optimizer's state {prefix}{key} is a {type(value).__name__}; expected tensors in dicts"
            )
    return found


def _nested(
    state: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "optimizer."
) -> dict[str, Any]:
    """Return ``values``, which have flat names, in the structure of ``state``."""
    return {
        key: _nested(value, values, f"{prefix}{key}.") if isinstance(value, Mapping) else values[prefix + key]
        for key, value in state.items()
    }


def of_training(
    step: TracedStep,
    metrics: Sequence[str],
    optimizer: Optimizer,
    state: Mapping[str, Any],
    target: Target,
    functions: dict[str, Site],
) -> dict[str, onnx.ModelProto]:
    """Return the files with gradients or an optimizer, by their names.

    Args:
        step: the step.
        metrics: names of the values that are computed besides the loss.
        optimizer: the optimizer's function.
        state: the optimizer's initial state.
        target: the runtime of the files.
        functions: receives the site of each Function that a file calls, by its key.

    Raises:
        ExportError: the optimizer cannot be exported, or a file would be too large.
        UnsupportedOperatorError: an operator has no translation to ONNX's operators.
        OptionError: a metric has the name of another output.
    """
    gradients = of_gradients(step, metrics, target, functions)
    optimizing = of_optimizer(step, optimizer, state, target)
    return {
        TRAIN_STEP: train_step(step, gradients, optimizing),
        TRAINING_MODEL: training_model(step, gradients, target),
        OPTIMIZER_MODEL: optimizing.file(),
    }


def of_gradients(
    step: TracedStep, metrics: Sequence[str], target: Target, functions: dict[str, Site]
) -> Part:
    """Return the part of two files that computes gradients.

    Its inputs are batch, parameters and buffers, its outputs loss, metrics, buffers and gradients.
    """
    made = StepGraph(mode_of(step))
    values = place_inputs(made, step)
    _add_seed(made, step)
    gradients = add_step(made, step, values)
    _results(made, step, metrics, values)
    others = {updated(step.given[position].name): values[n] for position, n in step.joint.written.items()}
    others.update({_gradient(name): gradients[name] for name in reached_names(step)})
    for name in made.outputs.keys() & others:
        raise name_taken(name)
    made.outputs.update(others)
    return lower_step(made, target, functions)


def of_optimizer(step: TracedStep, optimizer: Optimizer, state: Mapping[str, Any], target: Target) -> Part:
    """Return the optimizer's part.

    Its inputs are parameters, their gradients, state and learning rate, its outputs parameters and state.
    """
    made = StepGraph(mode_of(step))
    nodes = _parameters(step)
    names = parameter_names(step)
    parameters = {name: made.input_like(name, nodes[name]) for name in names}
    gradients = {n: made.input_like(accumulated(n), nodes[n]) for n in reached_names(step)}
    flat = flat_state(state)
    states = {name: made.input(name, value.shape, value.dtype) for name, value in flat.items()}
    rate = made.input(LEARNING_RATE, (), torch.float32)
    _optimize(made, optimizer, state, parameters, gradients, states, rate)
    return lower_step(made, target, {})


def train_step(step: TracedStep, gradients: Part, optimizer: Part) -> onnx.ModelProto:
    """Return the file of a whole step.

    Its inputs are batch, learning rate, parameters and state, its outputs loss, metrics, parameters and
    state.
    """
    connected = {accumulated(name): _gradient(name) for name in reached_names(step)}
    return joined(gradients, optimizer, connected, shared=parameter_names(step))


def training_model(step: TracedStep, gradients: Part, target: Target) -> onnx.ModelProto:
    """Return the file that accumulates gradients.

    Its inputs are batch, parameters and sums of gradients, its outputs loss, metrics and sums of gradients.
    """
    made = StepGraph(mode_of(step))
    nodes, names = _parameters(step), reached_names(step)
    sums = [made.input_like(accumulated(n), nodes[n]) for n in names]
    fresh = [made.input_like(_gradient(n), nodes[n]) for n in names]
    reset = made.input(RESET, (1,), torch.bool)

    def add(fresh: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        half = len(tensors) // 2
        # Not a product with zero, which would keep NaN.
        return [
            torch.where(fresh, gradient, total + gradient)
            if total.dim()
            else torch.where(fresh.reshape(()), gradient, total + gradient)
            for total, gradient in zip(tensors[:half], tensors[half:], strict=True)
        ]

    for name, node in zip(names, made.compute(add, [reset, *sums, *fresh]), strict=True):
        made.outputs[f"{name}_grad.accumulation.out"] = node
    return joined(
        gradients, lower_step(made, target, {}), {_gradient(name): _gradient(name) for name in names}
    )


def _gradient(name: str) -> str:
    """Return the name of a parameter's gradient between two parts of a file."""
    return f"gradient of {name}"


def _parameters(step: TracedStep) -> dict[str, torch.fx.Node]:
    return {step.given[p].name: n for n, p in step.joint.inputs.items() if step.given[p].kind == "parameter"}


def parameter_names(step: TracedStep) -> list[str]:
    """Return the names of the parameters that the graph reads and that are trained."""
    return [g.name for p in step.joint.inputs.values() if (g := step.given[p]).kind == "parameter"]


def reached_names(step: TracedStep) -> list[str]:
    """Return the names of the parameters for which the loss has a gradient."""
    found = [p for p in step.joint.inputs.values() if p in step.reached and p in step.joint.gradients]
    return [step.given[p].name for p in found if step.given[p].kind == "parameter"]


def _add_seed(made: StepGraph, step: TracedStep) -> None:
    if draws(step):
        made.input(SEED, (2,), torch.int64)


def _results(
    made: StepGraph, step: TracedStep, metrics: Sequence[str], values: Mapping[torch.fx.Node, torch.fx.Node]
) -> None:
    names = ["loss", *metrics]
    for name, node in zip(names, step.joint.outputs, strict=True):
        made.outputs[name] = values[node]
    loss = made.outputs["loss"]
    if loss.meta["val"].dim():
        made.outputs["loss"] = made.compute(lambda value: [value.reshape(())], [loss])[0]


def _optimize(
    made: StepGraph,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    parameters: Mapping[str, torch.fx.Node],
    gradients: Mapping[str, torch.fx.Node],
    states: Mapping[str, torch.fx.Node],
    rate: torch.fx.Node,
) -> None:
    """Add an optimizer's step to a graph."""

    def run(lr: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        own = {name: next(given) for name in parameters}
        found = {name: next(given) for name in gradients}
        kept = {name: next(given) for name in states}
        with torch.no_grad():
            # In a new dict, as the optimizer may write to it.
            new, after = _pair(optimizer(dict(own), found, _nested(state, kept), lr))
        return [*_checked("parameter", own, new), *_checked("state", kept, flat_state(after))]

    given = [rate, *parameters.values(), *gradients.values(), *states.values()]
    names = [*parameters, *states]
    try:
        nodes = made.compute(run, given)
    except DATA_DEPENDENT as error:
        raise ExportError(
            f"the optimizer's Python code depends on a value inside a tensor ({str(error).splitlines()[0]}), "
            f"so one graph cannot represent every step. Choose by torch.where"
        ) from error
    for name, node in zip(names, nodes, strict=True):
        made.outputs[updated(name)] = node


def _pair(given: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the parameters and the state in an optimizer's result.

    Raises:
        ExportError: the result has another form.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ExportError(
            f"the optimizer gave a {type(given).__name__}; expected (parameters, state), two dicts"
        )
    for what, one in zip(("parameters", "state"), given, strict=True):
        if not isinstance(one, Mapping):
            raise ExportError(f"the optimizer gave {what} as a {type(one).__name__}; expected a dict")
    return given[0], given[1]


def _checked(
    what: str, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors in an optimizer's result, after a comparison with its arguments.

    Raises:
        ExportError: names, shapes or dtypes differ.
    """
    if before.keys() != after.keys():
        fills = what == "state" and not before
        raise ExportError(
            f"the optimizer gave {what}s {sorted(after)}; expected {sorted(before)}, as it got them"
            f"{'. One that fills its state needs an attribute init(parameters) that gives the first' * fills}"
        )
    for name, value in before.items():
        new = after[name]
        if not isinstance(new, torch.Tensor):
            raise ExportError(
                f"the optimizer gave {what} {name!r} as a {type(new).__name__}; expected a tensor"
            )
        if new.shape != value.shape or new.dtype != value.dtype:
            raise ExportError(
                f"the optimizer gave {what} {name!r} as {new.dtype} of shape {tuple(new.shape)}; expected "
                f"{value.dtype} of shape {tuple(value.shape)}, as it got it"
            )
    return [after[name] for name in before]
