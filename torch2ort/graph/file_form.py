"""The two forms of a graph: operators of ONNX in files, and the nodes that sessions of torch2ort run."""

from __future__ import annotations

import onnx

from torch2ort.graph.composed_operators import compose, decompose, may_compose
from torch2ort.graph.function_calls import each_body
from torch2ort.graph.gelu_formulas import formulas_as_gelus, gelus_as_formulas, is_gelu
from torch2ort.graph.graph_traversal import graphs_in
from torch2ort.graph.refinements import is_refinement, marks_as_refinements, refinements_as_marks


def file_form(model: onnx.ModelProto, *, is_own: bool) -> onnx.ModelProto:
    """Return the form of a model that files contain.

    Args:
        model: in the form that sessions run.
        is_own: whether ``model`` may be changed. If not, a changed copy is returned, or ``model`` itself if
            both forms are the same.
    """
    nodes = [node for part in (*graphs_in(model.graph), *model.functions) for node in part.node]
    differs = _unused_domains(model) or may_compose(model)
    if not differs and not any(is_gelu(node) or is_refinement(node) for node in nodes):
        return model
    made = model
    if not is_own:
        made = onnx.ModelProto()
        made.CopyFrom(model)
    _parts_as_in_files(made)
    each_body(made, _parts_as_in_files)
    forget_unused_domains(made)
    return made


def _parts_as_in_files(model: onnx.ModelProto) -> None:
    refinements_as_marks(model)
    gelus_as_formulas(model)
    compose(model)


def forget_unused_domains(model: onnx.ModelProto) -> None:
    """Remove imports of domains that no node uses; keep the standard one."""
    for entry in _unused_domains(model):
        model.opset_import.remove(entry)


def _unused_domains(model: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    parts = [*graphs_in(model.graph), *model.functions]
    used = {node.domain for part in parts for node in part.node} | {f.domain for f in model.functions}
    return [entry for entry in model.opset_import if entry.domain and entry.domain not in used]


def run_form(model: onnx.ModelProto) -> None:
    """Turn a model of :func:`file_form`, or of an earlier version of torch2ort, into the form of sessions.

    Raises:
        ModelLoadError: another tool changed it, or its metadata is damaged.
    """
    _parts_as_in_runs(model)
    each_body(model, _parts_as_in_runs)


def _parts_as_in_runs(model: onnx.ModelProto) -> None:
    decompose(model)
    marks_as_refinements(model)
    formulas_as_gelus(model)
    used = {node.domain for graph in graphs_in(model.graph) for node in graph.node} - {""}
    if used:
        # The fusions of ONNX Runtime make operators of this domain; it looks them up only if the model
        # imports it.
        used.add("com.microsoft")
    missing = used - {entry.domain for entry in model.opset_import}
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(missing))
