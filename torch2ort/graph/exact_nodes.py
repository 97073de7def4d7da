"""Nodes for which a session of torch2ort's computes as eager PyTorch what ONNX Runtime computes otherwise."""

from __future__ import annotations

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.graph.graph_traversal import graphs_in

# Metadata of such a node; a plain session does without.
# NaN counts as in PyTorch. The value is the element type, as onnx.TensorProto names it.
NAN_META = "torch2ort.nan"
# Tensors are others in a run, as eager PyTorch has them (graph/refinements.py).
REFINED_META = "torch2ort.refined"
# The node is a GELU, or ends its formula (graph/gelu_formulas.py): its element type, in files behind the
# operator and before the input.
GELU_META = "torch2ort.gelu"
# The node stands for others, in files (graph/composed_operators.py): these.
COMPOSED_META = "torch2ort.composed"
# Those without which a session is not exact.
_KINDS = frozenset({NAN_META, REFINED_META, COMPOSED_META})


def exact_nodes(model: onnx.ModelProto) -> list[str]:
    """Names of all nodes that are marked, those of bodies included, in order."""
    nodes = [node for part in (*graphs_in(model.graph), *model.functions) for node in part.node]
    return [n.name for n in nodes if any(prop.key in _KINDS for prop in n.metadata_props)]


def nan_type(node: onnx.NodeProto) -> str | None:
    """The element type in which a node counts NaN as PyTorch does; ``None`` where it does not."""
    return next((prop.value for prop in node.metadata_props if prop.key == NAN_META), None)


def changed_node(node: onnx.NodeProto) -> ModelLoadError:
    """The error of a node that is not what its metadata say."""
    return ModelLoadError(
        f"its node '{node.name}' has other tensors than its metadata describe: it was changed by another "
        f"tool. Export the model again, or open it in a plain onnxruntime.InferenceSession, which computes "
        f"it as ONNX Runtime does"
    )
