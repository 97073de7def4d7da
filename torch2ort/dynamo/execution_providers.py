"""The execution providers of a graph of dynamo: those of its tensors' devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.options import Options
from torch2ort.providers import CPU, Provider, name_of
from torch2ort.training.ort_targets import PROVIDERS

_CUDA = "CUDAExecutionProvider"
_OUT = "Move the model and its inputs with .cpu(), or exclude that part with torch.compiler.disable"


def on_its_devices(graph: torch.fx.Graph, inputs: Sequence[Any], options: Options) -> Options:
    """Return the options of a graph, with the providers on which it runs.

    Args:
        graph: dynamo's graph.
        inputs: its arguments, including parameters.
        options: the user's, with providers if the user chose some.

    Raises:
        UnsupportedOperatorError: its tensors are on several devices, or on one on which no session runs.
    """
    results: list[Any] = []
    torch.fx.map_arg(graph.output_node().args[0], lambda node: results.append(node.meta.get("example_value")))
    providers = providers_of(inputs, results, options.providers)
    for name in map(name_of, providers or ()):
        if name not in PROVIDERS:
            raise UnsupportedOperatorError(
                f"the tensors of the compiled code are on a device of the {name}, and torch.compile runs on "
                f"{' and '.join(PROVIDERS)} alone so far, as the values that go from forward to backward, "
                f"and to Functions, are in the CPU's memory. {_OUT}"
            )
    return replace(options, providers=providers)


def providers_of(
    inputs: Sequence[Any], outputs: Sequence[Any], default: Sequence[Provider] | None
) -> Sequence[Provider] | None:
    """Return the providers of the device of a graph's inputs, or of its outputs where no input is a tensor.

    Args:
        inputs: the graph's; values that are no tensors are ignored.
        outputs: the graph's.
        default: the providers for the CPU, and for a graph without tensors.

    Raises:
        UnsupportedOperatorError: the tensors are on several devices, or on one without a provider. Beside
            other tensors, one on the CPU without dimensions is ignored, as in PyTorch.
    """
    tensors = _tensors(inputs) or _tensors(outputs)
    devices = dict.fromkeys(t.device for t in tensors if t.dim() > 0 or t.device.type != "cpu")
    if len(devices) > 1:
        raise UnsupportedOperatorError(
            f"the tensors of the compiled code are on {', '.join(map(str, devices))}, and a session takes "
            f"those of one device. {_OUT}"
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "cpu":
        return default
    if device.type == "cuda":
        return (_CUDA, (("device_id", str(device.index or 0)),)), CPU
    raise UnsupportedOperatorError(
        f"the tensors of the compiled code are on {device}, which no execution provider is known for. {_OUT}"
    )


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
