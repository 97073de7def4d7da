"""Operators and opsets that the installed onnxruntime supports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import onnx

from torch2ort.errors import OptionError
from torch2ort.options import DEFAULT_OPSET
from torch2ort.runtime import _ort_private as private

# Every onnxruntime that torch2ort runs on supports this opset.
_SURE_OPSET = 21


def checked_opset(opset: int | None) -> int:
    """Return the opset of graphs.

    Args:
        opset: at least 18; ``None`` for 18.

    Raises:
        OptionError: the installed onnx or onnxruntime does not support it.
    """
    if opset is None or opset <= _SURE_OPSET:
        return opset or DEFAULT_OPSET
    highest = _highest_opset()
    if opset > highest:
        runtime = private.onnxruntime().__version__
        raise OptionError(
            f"Option 'opset' is {opset}; onnx {onnx.__version__} and onnxruntime {runtime} both take "
            f"{DEFAULT_OPSET} to {highest}. Export with one of these, or install newer ones."
        )
    return opset


@functools.cache
def _highest_opset() -> int:
    """Return the highest opset that both support; a released onnxruntime refuses an unreleased opset."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "probe", [value], [result])
    for opset in range(onnx.defs.onnx_opset_version(), _SURE_OPSET, -1):
        with contextlib.suppress(Exception):  # onnxruntime's exceptions have no common class
            probe_session(graph, opset=opset)
            return opset
    return _SURE_OPSET


def probe_session(graph: onnx.GraphProto, domain: str = "", opset: int = DEFAULT_OPSET) -> Any:
    """Create a session on the CPU without log messages, to test the installed onnxruntime.

    Args:
        graph: the graph.
        domain: the domain of nodes that are not ONNX's own.
        opset: the opset of ONNX's own.
    """
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(domain, 1)]
    # The version of the IR is older than any onnxruntime that torch2ort runs on.
    model = onnx.helper.make_model(graph, opset_imports=imports[: 2 if domain else 1], ir_version=8)
    settings = private.onnxruntime().SessionOptions()
    settings.log_severity_level = 4
    return private.onnxruntime().InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def can_run(node: onnx.NodeProto, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> bool:
    """Return True if onnxruntime can create a session for ``node`` on the CPU.

    Args:
        node: a node with all its attributes.
        inputs: ONNX element type of each input, by name.
        outputs: ONNX element type of each output, by name.

    Returns:
        True if it can; False also where no onnxruntime is installed.
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
        # onnxruntime's exceptions have no common class; any of them means that it does not run the node.
        return False
    return True
