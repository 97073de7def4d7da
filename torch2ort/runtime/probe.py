"""What the installed onnxruntime has kernels for."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from torch2ort.runtime import _ort_private as private


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
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(node.domain, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports[: 2 if node.domain else 1], ir_version=8)
    try:
        settings = private.onnxruntime().SessionOptions()
        settings.log_severity_level = 4
        private.onnxruntime().InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception:
        # onnxruntime's exceptions have no common class; whatever it is, it does not run the node.
        return False
    return True
