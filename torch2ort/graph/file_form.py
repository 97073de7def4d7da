"""The two forms of a graph: in files operators of ONNX, in sessions of torch2ort's the nodes they run."""

from __future__ import annotations

import onnx

from torch2ort.graph.gelu_formulas import formulas_as_gelus, gelus_as_formulas
from torch2ort.graph.graph_traversal import graphs_in
from torch2ort.graph.index_marks import checks_as_marks, marks_as_checks


def file_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy of it that files hold."""
    made = gelus_as_formulas(checks_as_marks(model))
    if made is model and _unused_domains(model):
        made = onnx.ModelProto()
        made.CopyFrom(model)
    forget_unused_domains(made)
    return made


def forget_unused_domains(model: onnx.ModelProto) -> None:
    """Import no domain that no node is of, but the standard one."""
    for entry in _unused_domains(model):
        model.opset_import.remove(entry)


def _unused_domains(model: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    parts = [*graphs_in(model.graph), *model.functions]
    used = {node.domain for part in parts for node in part.node} | {f.domain for f in model.functions}
    return [entry for entry in model.opset_import if entry.domain and entry.domain not in used]


def run_form(model: onnx.ModelProto) -> None:
    """Turn a model that :func:`file_form` gave, or an earlier version of torch2ort, into what sessions take.

    Raises:
        ModelLoadError: another tool changed it, or its metadata is damaged.
    """
    marks_as_checks(model)
    formulas_as_gelus(model)
