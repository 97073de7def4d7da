"""``infer_shape`` and ``alias_input``, static methods of classes that were written for ORTModule.

They count as registered. ORTModule passed them an ``onnx.NodeProto``, sizes as numbers or names, and ONNX's
numbers for dtypes, and accepted lists with -1 for an output that shares no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import onnx
import torch

from torch2ort.errors import InplaceMapError
from torch2ort.pythonop.attributes import ONNX_TYPES, call_attributes
from torch2ort.pythonop.registry.inferers import Inferer
from torch2ort.pythonop.registry.inplace import InplaceMap
from torch2ort.pythonop.site import TENSOR, PythonOpSite, Site

_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def own_inferer(function: type | None) -> Inferer | None:
    """Return the class's ``infer_shape`` as an inferer of torch2ort, or ``None``."""
    method = getattr(function, "infer_shape", None)
    if not callable(method):
        return None

    def infer(node: PythonOpSite, shapes: list[Any], dtypes: list[torch.dtype]) -> Any:
        from torch2ort.sizes import expressions as sizes  # sympy is slow to import

        given = [
            None if s is None else [d if isinstance(d, int) else sizes.text(d) for d in s] for s in shapes
        ]
        proto = _node(node.func_name, node.arguments, len(shapes), outputs=0)
        returned = method(proto, given, [ONNX_TYPES[dtype] for dtype in dtypes])
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            return returned
        shapes_out, numbers = returned
        return shapes_out, [_dtype(number) for number in numbers]

    return infer


def own_inplace_map(site: Site) -> InplaceMap | None:
    """Return the map that the class's ``alias_input`` declares for a call, or ``None``.

    Raises:
        InplaceMapError: ``alias_input`` does not return two lists of the right lengths.
    """
    method = getattr(site.function, "alias_input", None)
    if not callable(method):
        return None
    outputs = site.known_result.outputs
    tensors = [i for i, value in enumerate(outputs) if value is TENSOR]
    node = _node(site.func_name, site.constants, len(site.tensor_positions), outputs=len(tensors))
    returned = method(node.SerializeToString())
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise InplaceMapError(
            f"{site.func_name}: alias_input returned {returned!r}; expected a pair of lists, the inputs "
            f"that the outputs are, and the output gradients that the input gradients are"
        )
    forward, backward = map(list, returned)
    if len(forward) != len(tensors) or len(backward) != len(site.arguments):
        raise InplaceMapError(
            f"{site.func_name}: alias_input returned lists of {len(forward)} and {len(backward)} entries; "
            f"expected "
            f"one entry for each of {len(tensors)} tensor outputs, and for each of {len(site.arguments)} "
            f"arguments"
        )
    for given, which in ((forward, "inputs"), (backward, "output gradients")):
        memories = [memory for memory in given if memory != -1]
        if len(set(memories)) < len(memories):
            raise InplaceMapError(
                f"{site.func_name}: alias_input returned {given} for {which}, which gives the same memory to "
                f"two; expected every number but -1 once"
            )
    return InplaceMap(
        MappingProxyType({tensors[i]: argument for i, argument in enumerate(forward) if argument != -1}),
        MappingProxyType({i: tensors[output] for i, output in enumerate(backward) if output != -1}),
    )


def _node(func_name: str, constants: Mapping[int, Any], tensors: int, *, outputs: int) -> onnx.NodeProto:
    names = ["ctx", *(f"output_{i}" for i in range(outputs))]
    return onnx.helper.make_node(
        "PythonOp",
        [f"input_{i}" for i in range(tensors)],
        names,
        domain="com.microsoft",
        func_name=func_name,
        **call_attributes(constants, tensors + len(constants)),
    )


def _dtype(number: Any) -> Any:
    try:
        return _DTYPES.get(int(number), number)
    except (TypeError, ValueError):
        return number
