"""Nodes that a session of torch2ort computes as eager PyTorch does, and ONNX Runtime differently."""

from __future__ import annotations

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.graph.graph_traversal import graphs_in

# Keys of the metadata of such nodes; a plain session ignores them.
# The node treats NaN as PyTorch does. The value is the element type, as onnx.TensorProto names it.
NAN_META = "torch2ort.nan"
# Tensors of the node are computed differently in a run, as eager PyTorch computes them
# (graph/refinements.py).
REFINED_META = "torch2ort.refined"
# The node is a GELU, or the last node of its formula (graph/gelu_formulas.py). The value is the element type;
# in files, the operator, the element type and the input.
GELU_META = "torch2ort.gelu"
# The node replaces others, in files (graph/composed_operators.py). The value is these nodes.
COMPOSED_META = "torch2ort.composed"
# The keys without which a session is not exact.
_KINDS = frozenset({NAN_META, REFINED_META, COMPOSED_META})


def exact_nodes(model: onnx.ModelProto) -> list[str]:
    """Return the names of all marked nodes, including those of bodies, in order."""
    nodes = [node for part in (*graphs_in(model.graph), *model.functions) for node in part.node]
    return [n.name for n in nodes if any(prop.key in _KINDS for prop in n.metadata_props)]


def nan_type(node: onnx.NodeProto) -> str | None:
    """Return the element type in which a node treats NaN as PyTorch does; ``None`` if it does not."""
    return next((prop.value for prop in node.metadata_props if prop.key == NAN_META), None)


def changed_node(node: onnx.NodeProto) -> ModelLoadError:
    """Return the error of a node that differs from its metadata."""
    return ModelLoadError(
        f"its node '{node.name}' has other tensors than its metadata describe: it was changed by another "
        f"tool. Export the model again, or open it in a plain onnxruntime.InferenceSession, which computes "
        f"it as ONNX Runtime does"
    )
