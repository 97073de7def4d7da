"""What the installed onnxruntime has kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from torch2ort.runtime import _ort_private as private


def probe_session(graph: onnx.GraphProto, domain: str = "") -> Any:
    """A session on the CPU that says nothing, over a graph that asks something of the installed onnxruntime.

    Args:
        graph: the graph.
        domain: of nodes in it that are not ONNX's own.
    """
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(domain, 1)]
    # Older than any onnxruntime that torch2ort runs on.
    model = onnx.helper.make_model(graph, opset_imports=imports[: 2 if domain else 1], ir_version=8)
    settings = private.onnxruntime().SessionOptions()
    settings.log_severity_level = 4
    return private.onnxruntime().InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def can_run(node: onnx.NodeProto, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> bool:
    """Whether onnxruntime makes a session for ``node`` on the CPU.

    Args:
        node: a node with all its attributes.
        inputs: ONNX element type of each input, by name.
        outputs: ONNX element type of each output, by name.

    Returns:
        False also where no onnxruntime is installed.
    """
    graph = onnx.helper.make_graph(
        [node],
        "probe",
        [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    try:
        probe_session(graph, node.domain)
    except Exception:
        # onnxruntime's exceptions have no common class; whatever it is, it does not run the node.
        return False
    return True
