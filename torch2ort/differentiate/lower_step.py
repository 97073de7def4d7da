"""Translation of one half of a step to ONNX."""

from __future__ import annotations

import warnings

import onnx_ir as ir

from torch2ort import symbolics
from torch2ort._torch import aot as private
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.differentiate.split import Half
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.program.effect_order import keep_order, keep_unused_calls
from torch2ort.program.target import Target
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD
from torch2ort.sizes.symbols import program_size_names
from torch2ort.sizes.unbacked_sizes import forget_new_sizes
from torch2ort.support.startup_timing import TRANSLATE, timed
from torch2ort.symbolics.python_op_nodes import SiteNodes
from torch2ort.symbolics.registered import translating
from torch2ort.symbolics.registered.user_gradient_ops import translations
from torch2ort.symbolics.value_names import separate_outputs


@timed(TRANSLATE)
@exclusive.exporting()
def lower_half(half: Half, target: Target) -> Lowered:
    """Translate one half of a step.

    Args:
        half: the half; its graph is changed.
        target: the target of halves.

    Raises:
        UnsupportedOperatorError: an operator cannot be part of a graph.
    """
    graph = half.graph_module.graph
    forget_new_sizes(graph)
    for node in graph.nodes:
        # The derivative of an operator belongs to the operator's module.
        if "nn_module_stack" not in node.meta and node.meta.get("fwd_nn_module_stack"):
            node.meta["nn_module_stack"] = node.meta["fwd_nn_module_stack"]
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    program = private.program_of(half.graph_module, list(graph.find_nodes(op="placeholder")), outputs)
    names = program_size_names(program)
    nodes = SiteNodes(names, target)
    with translating(names, target), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies its own deprecated tree specs
        try:
            prepared = symbolics.prepare(program, target)
            translated = symbolics.translate(
                prepared,
                target,
                python_op=nodes.translate,
                others={PYTHON_OP_GRAD: nodes.translate_backward, **translations()},
            )
        except UserError as carrier:
            raise carrier.error from None
    model = translated.model
    calls, derivatives = nodes.name(model.graph), nodes.name_backward(model.graph)
    model.opset_imports.setdefault("com.microsoft", 1)
    leaving = [n for n, site in calls.items() if site.known_result.uses_rng or site.known_result.effects]
    keep_order(model.graph, {*leaving, *derivatives})
    separate_outputs(model.graph)
    if model.graph.outputs:
        keep_unused_calls(model.graph, calls)
    proto = ir.to_proto(model)
    return Lowered(proto, calls, derivatives)
