"""The error of eager PyTorch for the index that made a run fail.

An exported graph replaces an index that eager PyTorch refuses by one that ONNX Runtime's kernels refuse.
Their errors name a node of the graph; eager PyTorch's names the index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch

from torch2ort.errors import EngineError
from torch2ort.graph.graph_traversal import ancestors
from torch2ort.graph.refinements import check_of, is_check
from torch2ort.kernels.index_check import refuse_index
from torch2ort.pythonop import Site
from torch2ort.runtime.ortvalues import to_tensor

# Creates a session from a model and the sites of its PythonOp nodes.
MakeSession = Callable[[onnx.ModelProto, Mapping[str, Site]], Any]


def refused_index(
    proto: onnx.ModelProto, sites: Mapping[str, Site], values: Mapping[str, Any], make_session: MakeSession
) -> Exception | None:
    """Return the error of eager PyTorch, if an index made a run of the model fail; else ``None``.

    Args:
        proto: an exported model.
        sites: the site of each of its PythonOp nodes, by node name.
        values: the run's inputs: an ``OrtValue`` for each.
        make_session: creates a session of a part of the model.
    """
    checks = [node for node in proto.graph.node if is_check(node)]

    def first_refusal(part: Sequence[onnx.NodeProto]) -> Exception | None:
        names = [name for node in part for name in node.input[1:]]
        tensors = iter(_computed(proto, names, sites, values, make_session))
        calls = [(check_of(node), [next(tensors) for _ in node.input[1:]]) for node in part]
        return next((error for call in calls if (error := _refusal(*call)) is not None), None)

    try:
        return first_refusal(checks) if checks else None
    except EngineError:
        # The index of one check may be computed from a value that another one guards: check them one by one.
        with contextlib.suppress(EngineError):
            return next((error for node in checks if (error := first_refusal([node])) is not None), None)
    return None


def _refusal(text: str, tensors: Sequence[torch.Tensor]) -> Exception | None:
    try:
        refuse_index(text, tensors)
    except Exception as error:
        return error
    return None


def _computed(
    proto: onnx.ModelProto,
    names: Sequence[str],
    sites: Mapping[str, Site],
    values: Mapping[str, Any],
    make_session: MakeSession,
) -> list[torch.Tensor]:
    """Compute the values of these names.

    Raises:
        EngineError: ONNX Runtime refuses their part of the graph.
    """
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    graph = model.graph
    needed = ancestors(proto.graph, names)
    kept = [node for node in proto.graph.node if not needed.isdisjoint(node.output)]
    outputs = [f"{name}.checked_{i}" for i, name in enumerate(names)]
    del graph.node[:], graph.output[:]
    graph.node.extend(kept)
    for name, output in zip(names, outputs, strict=True):
        graph.node.append(onnx.helper.make_node("Identity", [name], [output]))
        graph.output.append(onnx.ValueInfoProto(name=output))
    for value in [v for v in graph.input if v.name not in needed]:
        graph.input.remove(value)
    present = {node.name for node in kept}
    session = make_session(model, {name: site for name, site in sites.items() if name in present})
    try:
        fetched = session._sess.run_with_ort_values(
            {v.name: values[v.name] for v in graph.input}, outputs, None
        )
    except Exception as error:
        raise EngineError(str(error)) from error
    return [to_tensor(fetched[i]) for i in range(len(fetched))]
