"""The dtype of tensors that are made of nothing, which PyTorch takes from a setting of the process."""

from __future__ import annotations

import torch

from torch2ort.program.kernel_sites import is_operator


def write_default_dtypes(graph: torch.fx.Graph) -> None:
    """Write into each call that makes a tensor of sizes or numbers the dtype that it had in the trace.

    torch.onnx takes ``float32`` where a call says none, whatever ``torch.set_default_dtype`` said.

    Args:
        graph: a program's nodes; changed in place.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not is_operator(node) or not isinstance(value, torch.Tensor):
            continue
        arguments = node.target._schema.arguments
        if any(str(argument.type) == "Tensor" for argument in arguments):
            continue
        if any(argument.name == "dtype" and argument.kwarg_only for argument in arguments):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}
