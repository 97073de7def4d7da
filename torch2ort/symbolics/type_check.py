"""Check of a finished graph's types and shapes against ONNX's inference: runtimes refuse contradictions."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.support.provenance import line_of, operator_of

_MISMATCHES = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)


def refuse_mistyped(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Refuse a graph for which onnx infers other types or shapes than it declares.

    Args:
        proto: the graph; its weights are inputs, so the check costs the same for models of each size.
        model: the same graph.

    Raises:
        UnsupportedOperatorError: with the operator, its line, onnx's error, and what to do.
    """
    said = _mismatch(proto)
    if said is None:
        return
    node = model.graph[_first_wrong(proto)]
    raise UnsupportedOperatorError(
        f"{operator_of(node)} at {line_of(node)} has no translation to ONNX for tensors of these types and "
        f"shapes: its {node.op_type} does not fit ({said}). Write it with others, register a translation "
        f"with torch2ort.register_symbolic, or put it into a torch.autograd.Function"
    )


def _mismatch(proto: onnx.ModelProto) -> str | None:
    try:
        onnx.checker.check_model(proto, full_check=True)
    except _MISMATCHES as error:
        return " ".join(str(error).split())
    return None


def _first_wrong(proto: onnx.ModelProto) -> int:
    """Return the first node that contradicts those before it; onnx names a node in some errors only."""
    nodes = list(proto.graph.node)
    fitting, wrong = 0, len(nodes)
    while wrong - fitting > 1:
        middle = (fitting + wrong) // 2
        if _mismatch(_beginning(proto, nodes[:middle])) is None:
            fitting = middle
        else:
            wrong = middle
    return wrong - 1


def _beginning(proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    """Return the graph with only its first nodes, and without outputs."""
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    del part.graph.node[:]
    del part.graph.output[:]
    part.graph.node.extend(nodes)
    return part
