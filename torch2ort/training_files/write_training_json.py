"""The content of ``training.json``, determined from the graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx
import torch

from torch2ort.artifacts import read_training_json as names
from torch2ort.artifacts.read_training_json import Tensor
from torch2ort.errors import ExportError
from torch2ort.graph.file import refuse_unstorable
from torch2ort.pythonop import Site
from torch2ort.sizes.unbacked_sizes import added_conditions
from torch2ort.support.user_warnings import warn
from torch2ort.training_files.module_with_loss import WithLoss
from torch2ort.training_files.traced_step import StepInput, TracedStep
from torch2ort.training_files.training_models import updated

_TRAINED = (torch.float32, torch.float64)
# The dtypes that NumPy has, and that a checkpoint may contain.
_KNOWN = (
    *_TRAINED, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def of_kind(step: TracedStep, kind: str) -> list[StepInput]:
    """Return the inputs of a step of one kind, in order.

    Raises:
        ExportError: a parameter has a dtype that no step trains, or a buffer one that no checkpoint stores.
    """
    found = [g for g in (step.given[p] for p in step.joint.inputs.values()) if g.kind == kind]
    for given in found:
        assert given.value is not None
        allowed = _TRAINED if kind == "parameter" else _KNOWN
        if given.value.dtype not in allowed:
            raise ExportError(
                f"{kind} {given.name!r} is {given.value.dtype}; expected one of "
                f"{', '.join(map(str, allowed))}, in which a training step as a file computes. Convert the "
                f"model before the export, with model.float()"
            )
    return found


def fixed(value: torch.Tensor) -> Tensor:
    """Return the description of a tensor of fixed shape."""
    return Tensor(_numpy_name(value.dtype), tuple(value.shape))


def batch(step: TracedStep) -> dict[str, Tensor]:
    """Return the description of each tensor of a batch.

    Raises:
        ExportError: a tensor has a dtype that NumPy does not have.
    """
    sizes, signature = step.program.interface.sizes, step.program.signature
    tensors = {given.name: node for node, given in _batch_nodes(step)}
    found = {}
    for name, dims in zip(signature.inputs, sizes.dims, strict=True):
        dtype = tensors[name].meta["val"].dtype
        if dtype not in _KNOWN:
            raise ExportError(
                f"input {name!r} is {dtype}, of which numpy has no arrays; expected one of "
                f"{', '.join(map(str, _KNOWN))}. Give the batch in one of them, and convert it in forward"
            )
        found[name] = Tensor(_numpy_name(dtype), tuple(dims))
    return found


def ranges(step: TracedStep) -> dict[str, list[int | None]]:
    """Return the lower and the upper bound of each varying size."""
    return {name: list(bounds) for name, bounds in step.program.interface.sizes.ranges.items()}


def guards(step: TracedStep) -> list[str]:
    """Return further conditions on a batch's sizes: of the model, its derivatives and its translation.

    Raises:
        UnsupportedOperatorError: the sizes of the batch do not determine whether a condition holds.
    """
    nodes = {given.name: node for node, given in _batch_nodes(step)}
    inputs = [nodes[name].meta["val"] for name in step.program.signature.inputs]
    found = added_conditions(step.joint.graph_module.graph, step.known, inputs)
    return [*step.program.interface.sizes.guards, *found]


def _batch_nodes(step: TracedStep) -> list[tuple[torch.fx.Node, StepInput]]:
    pairs = [(node, step.given[position]) for node, position in step.joint.inputs.items()]
    return [(node, given) for node, given in pairs if given.kind == "batch"]


def _numpy_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aliases(wrapped: WithLoss, state: Collection[str]) -> dict[str, str]:
    """Map the second names of tied parameters and buffers to the name in ``state``."""
    first: dict[int, str] = {}
    every = list(wrapped.state_dict(keep_vars=True).items())
    named = [(name.removeprefix("model."), id(value)) for name, value in every]
    for name, key in named:
        if name in state:
            first[key] = name
    return {name: first[key] for name, key in named if key in first and first[key] != name}


def feeds(models: Mapping[str, onnx.ModelProto], gradients: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Map the outputs of each file to the inputs of the next call that they become."""
    found: dict[str, dict[str, str]] = {}
    for file, model in models.items():
        inputs = {value.name for value in model.graph.input}
        pairs = {updated(name): name for name in inputs}
        pairs.update({f"{name}_grad.accumulation.out": buffer for name, buffer in gradients.items()})
        outputs = [value.name for value in model.graph.output]
        found[file] = {name: pairs[name] for name in outputs if name in pairs}
    return found


def function_names(functions: Mapping[str, Site]) -> list[str]:
    """Return the names of the Functions that the files call, with a warning if there are any.

    Raises:
        ExportError: an argument of one is an object that a file cannot store.
    """
    for site in functions.values():
        refuse_unstorable(site)
    found = sorted({site.func_name for site in functions.values()})
    if found:
        warn(
            f"the training step calls {', '.join(found)}, which no exporter maps to ONNX operators: its "
            f"files run only beside PyTorch and torch2ort's custom-op library. Map it with "
            f"torch2ort.register_exporter, and its gradient with torch2ort.register_gradient"
        )
    return found


def is_seeded(model: onnx.ModelProto, functions: Mapping[str, Site]) -> bool:
    """Return True if a graph takes a seed, or calls Functions that draw random numbers."""
    takes = any(value.name == names.SEED for value in model.graph.input)
    return takes or any(site.known_result.uses_rng for site in functions.values())


def numpy_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert tensors to NumPy arrays."""
    return {name: value.detach().cpu().numpy() for name, value in tensors.items()}
