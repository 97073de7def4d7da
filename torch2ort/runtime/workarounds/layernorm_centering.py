"""Layer normalizations that are correct where a row's spread is small compared to its mean.

Some versions of onnxruntime compute the variance of a row as the mean of its squares minus the square of its
mean. For rows near 10 with a spread of 0.001, the result is rounding error, or negative, and the normalized
row is NaN. PyTorch subtracts the mean first, as later versions of onnxruntime do. A normalization does not
depend on a constant that is subtracted from a row, so with the earlier versions the mean is subtracted before
it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.kernel_support import probe_session
from torch2ort.runtime.replace_nodes import constant, replace_nodes

# They build such normalizations from operators that subtract the mean, and from those of this module.
_FUSIONS = ("LayerNormFusion", "SkipLayerNormFusion")


@functools.cache
def subtracts_mean() -> bool:
    """Return True if the installed onnxruntime subtracts the mean before it squares; determined by a run."""
    float_type = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("LayerNormalization", ["x", "scale"], ["y"], axis=-1)],
        "probe",
        [helper.make_tensor_value_info("x", float_type, [1, 4])],
        [helper.make_tensor_value_info("y", float_type, [1, 4])],
        [numpy_helper.from_array(np.ones(4, np.float32), "scale")],
    )
    (row,) = probe_session(graph).run(None, {"x": np.array([[40000, 40001, 40002, 40003]], np.float32)})[0]
    return bool(np.allclose(row, np.array([-3, -1, 1, 3]) / np.sqrt(5), atol=1e-3))


def disabled_optimizers(settings: Any) -> list[str]:
    """Return the optimisers that must be disabled in a session with these settings."""
    # A graph that was optimised in another process starts without the run of subtracts_mean().
    if settings.graph_optimization_level == private.onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL:
        return []
    if not subtracts_mean():
        return [*private.DISABLED_OPTIMIZERS, *_FUSIONS]
    # From 1.30 on, LayerNormalization is vectorized and SkipLayerNormalization is not: 0.16 ms and 1.3 ms for
    # 1024 rows of 256 on an Intel Xeon. In 1.27 to 1.29 neither is.
    is_slow = private.version() >= (1, 30)
    return [*private.DISABLED_OPTIMIZERS, *(["SkipLayerNormFusion"] if is_slow else [])]


def center_normalizations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy whose rows the runtime normalizes as PyTorch does."""
    return model if subtracts_mean() else replace_nodes(model, _is_normalization, _centered)


def _centered(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> list[onnx.NodeProto]:
    shape = shapes.get(node.input[0])
    return centered(node, None if shape is None else len(shape))


def centered(node: onnx.NodeProto, rank: int | None) -> list[onnx.NodeProto]:
    """Return a LayerNormalization after the nodes that subtract each row's mean.

    Args:
        node: the LayerNormalization; it is not changed.
        rank: rank of its input; ``None`` if it is not known.
    """
    source, name = node.input[0], f"{node.output[0]}/centered"
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    nodes = list(_axes(source, axis, rank, name))
    nodes += [
        helper.make_node("ReduceMean", [source, f"{name}/axes"], [f"{name}/mean"], keepdims=1),
        helper.make_node("Sub", [source, f"{name}/mean"], [name]),
    ]
    for made in nodes:
        made.name = made.output[0]
    last = onnx.NodeProto()
    last.CopyFrom(node)
    last.input[0] = name
    return [*nodes, last]


def _axes(source: str, axis: int, rank: int | None, name: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute the axes from ``axis`` on, counted from the front (see symbolics.axes)."""
    axes, begin, end, step = (f"{name}/{part}" for part in ("axes", "begin", "rank", "step"))
    if rank is not None:
        yield constant(axes, np.arange(axis % rank, rank))
        return
    yield helper.make_node("Shape", [source], [f"{name}/shape"])
    yield helper.make_node("Size", [f"{name}/shape"], [end])
    yield constant(f"{name}/axis", np.array(axis))
    yield constant(step, np.array(1))
    if axis < 0:
        yield helper.make_node("Add", [end, f"{name}/axis"], [begin])
    yield helper.make_node("Range", [begin if axis < 0 else f"{name}/axis", end, step], [axes])


def _is_normalization(node: onnx.NodeProto) -> bool:
    return node.op_type == "LayerNormalization" and not node.domain
