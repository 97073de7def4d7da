"""Parameters and buffers that a model's code does not reach as attributes of a module.

A parameter or buffer in a list or a global is a constant to torch.export: its gradient would be lost, and
it would keep the value of the export.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.export.graph_signature import InputKind


def connect_constants(
    program: torch.export.ExportedProgram, root: torch.nn.Module, used: Collection[int]
) -> None:
    """Replace each constant that is the memory of a parameter or buffer by that one, in place.

    Args:
        program: the exported program of ``root``.
        root: the module that was exported.
        used: ids of the parameters that the code used themselves; of others it used a detached alias.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    inputs = {spec.target: nodes[spec.arg.name] for spec in specs if spec.kind in kinds}
    live = {**dict(root.named_buffers()), **dict(root.named_parameters())}
    names = {_memory(tensor): name for name, tensor in live.items() if name in inputs}
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for spec in specs:
        constant = (
            program.constants.get(spec.target or "") if spec.kind is InputKind.CONSTANT_TENSOR else None
        )
        name = names.get(_memory(constant)) if isinstance(constant, torch.Tensor) else None
        if name is None:
            continue
        source = inputs[name]
        if live[name].requires_grad and id(live[name]) not in used:
            with program.graph.inserting_before(first):
                source = program.graph.call_function(torch.ops.aten.detach.default, (source,))
            source.meta = dict(inputs[name].meta)
        nodes[spec.arg.name].replace_all_uses_with(source)
    program.graph_module.recompile()


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors of the same elements in the same memory."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
