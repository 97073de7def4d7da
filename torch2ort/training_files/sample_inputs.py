"""The sample of a training step: its call, and its structure for readers of the files without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.capture.dim_specs import flat_dim_specs
from torch2ort.capture.plain_tensors import as_plain_leaf, refuse_tensors
from torch2ort.capture.sample_call import Call
from torch2ort.capture.torch_modes import Modes
from torch2ort.errors import ExportError, SchemaError


def call_of(model: torch.nn.Module, sample: Any, dynamic_shapes: Any, *, has_loss: bool) -> tuple[Call, Any]:
    """Return the call with which a step is traced.

    Args:
        model: the model.
        sample: a batch.
        dynamic_shapes: the argument of :func:`torch2ort.export_training`.
        has_loss: True if the sample has inputs and targets.

    Returns:
        The call, and the structure of a batch with the names of its tensors.

    Raises:
        ExportError: the sample is no pair where it must be one, or ``dynamic_shapes`` has another structure.
        SchemaError: the sample contains an object that cannot be flattened.
    """
    apart = _apart(sample, "sample")
    if has_loss:
        if not isinstance(apart, (tuple, list)) or len(apart) != 2:
            raise ExportError(
                f"the sample of a training step with a loss is a {type(sample).__name__}; expected a "
                f"tuple of inputs and targets"
            )
        call = _bound(_pair, tuple(apart), dynamic_shapes)
    else:
        call = _bound(model.forward, apart, dynamic_shapes)
    names = {id(t): leaf.name or "input" for t, leaf in zip(call[1], call[0].schema.leaves, strict=True)}
    return call[0], _structure(apart, names)


def inputs_call(model: torch.nn.Module, sample: Any, dynamic_shapes: Any, *, has_loss: bool) -> Call:
    """Return the call of the model alone."""
    apart = _apart(sample, "sample")
    if not has_loss:
        return _bound(model.forward, apart, dynamic_shapes)[0]
    shapes = dynamic_shapes
    if isinstance(shapes, Mapping):
        shapes = shapes.get("inputs")
    elif shapes is not None:
        shapes = shapes[0] if len(shapes) else None
    if shapes is not None and not isinstance(apart[0], (tuple, dict)):
        shapes = (shapes,)
    return _bound(model.forward, apart[0], shapes)[0]


def _pair(inputs: Any, targets: Any) -> None:
    """Name the two parts of a batch, by the parameters; never called."""


def _bound(function: Callable[..., Any], sample: Any, dynamic_shapes: Any) -> tuple[Call, list[torch.Tensor]]:
    """Return a call, and the sample's own tensors in the call's order."""
    signature = io_schema.Signature.of(function)
    args, keywords = (sample, {}) if type(sample) is tuple else ((), sample)
    if type(sample) not in (tuple, dict):
        args, keywords = (sample,), {}
    bound = signature.bind(args, keywords)
    tensors, schema = io_schema.flatten(bound)
    refuse_tensors(tensors, schema)
    specs = flat_dim_specs(bound, dynamic_shapes, len(tensors))
    return Call(signature, [as_plain_leaf(t) for t in tensors], schema, Modes.now(), specs), tensors


def _apart(value: Any, path: str) -> Any:
    """Return the sample with a distinct tensor object at each place.

    Raises:
        SchemaError: a file cannot describe one of the containers.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_apart(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise SchemaError(
                f"{path}: a dict with keys that are not strings; a file of a training step has strings alone"
            )
        return {key: _apart(item, f"{path}[{key!r}]") for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise SchemaError(
        f"{path}: a {type(value).__name__}; a sample of a training step is made of tensors, tuples, lists, "
        f"dicts and numbers"
    )


def _structure(value: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": names[id(value)]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_structure(item, names) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _structure(item, names) for key, item in value.items()}}
    return {"constant": value}
