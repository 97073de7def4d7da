"""Export of one call of a model: trace and translation."""

from __future__ import annotations

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.capture.gradient_hooks import hook_refused
from torch2ort.capture.sample_call import Call, Purpose
from torch2ort.capture.torch_modes import traceable_modes
from torch2ort.capture.trace import Trace, trace
from torch2ort.errors import ExportError
from torch2ort.exports.graph_of_trace import graph_of_trace, log_graph
from torch2ort.graph.debug_dumps import save_stage
from torch2ort.graph.graph import GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.log import logger, suppress_libraries
from torch2ort.options import Options
from torch2ort.program.autocast_casts import insert_autocast_casts
from torch2ort.program.detach_range_bounds import detach_bounds
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.program.traced_program import kept_program, traced_program
from torch2ort.pythonop.autocast import off
from torch2ort.support.lazy import Lazy
from torch2ort.support.startup_timing import TRACE, TRANSLATE, phase
from torch2ort.symbolics import check
from torch2ort.symbolics.lowering import lower, signature_of, sizes_of


def export_call(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    target: Target,
    options: Options,
) -> Program:
    """Export a call: trace it, and translate it, unless its graph is made later, on request.

    Args:
        model: the model.
        call: the call.
        training: the mode; ``None`` means ``model.training``.
        target: the target of the graph.
        options: settings of debugging.

    Raises:
        ExportError: see :func:`torch2ort.export`.
    """
    with phase(TRACE), suppress_libraries(), exclusive.exporting(), traceable_modes(call.modes):
        traced = trace(model, call, training=training, fixed_sizes=target.is_trained)
        if target.is_trained and traced.hooked:
            raise hook_refused(model, f"{traced.hooked} puts a hook on a gradient,")
        # In a model without trained parameters, too, a result of ORTModule would lose its gradient.
        lost = call.modes.gradients and call.purpose is Purpose.MODULE and any(traced.ties.tracked)
        if traced.outside and (target.is_trained or lost):
            _refuse_outside(model, traced.outside)
        with off():
            sites = insert_autocast_casts(
                traced.program.graph_module, model, target, gradients=call.modes.gradients
            )
            traced.sites.update({site.key: site for site in sites})
            detach_bounds(traced.program.graph_module)
            return _program(model, call, traced, target, options)


def _program(model: torch.nn.Module, call: Call, traced: Trace, target: Target, options: Options) -> Program:
    """Return the program of a trace; the graph of one that is trained is only translated on request."""
    name = type(model).__name__
    copied = operators = onnx = None
    if target.is_trained:
        check(traced.program, target)
        signature, weights = signature_of(model, traced, call.schema)
        copied = kept_program(traced)
    if copied is None or options.save_onnx_dir is not None:
        with phase(TRANSLATE):
            graph, weights = lower(model, traced, call.schema, target)
            if target.give_bodies is not None:
                graph = target.give_bodies(graph, model, call, traced, target, options)
        save_stage(options, f"{name}_exported", graph.proto)
        log_graph(name, graph)
        signature = graph
    interface = _interface(call, traced, signature)
    if copied is not None:
        operators = traced_program(copied, traced, signature)
        logger.info("traced %s: %d operators", name, len(copied.graph.nodes))
        if options.save_onnx_dir is None:
            onnx = graph_of_trace(model, traced, call.schema, target)
    return Program(
        signature,
        weights,
        interface,
        target.training,
        traced.ties,
        effects=traced.effects,
        writer=_writer(signature, traced),
        traced=None if operators is None else Lazy(lambda: operators),
        onnx=onnx,
    )


def _writer(signature: GraphSignature, traced: Trace) -> str | None:
    """Return the first Function that writes to objects; empty if the model does; ``None`` if neither does."""
    functions = (site.func_name for site in traced.sites.values() if site.known_result.effects)
    return "" if signature.mutations else next(functions, "" if traced.effects else None)


def _interface(call: Call, traced: Trace, signature: GraphSignature) -> Interface:
    sizes = sizes_of(traced, signature.inputs)
    return Interface(call.signature, call.schema, traced.output_schema, sizes, traced.returned, call.same)


def _refuse_outside(model: torch.nn.Module, what: str) -> None:
    raise ExportError(
        f"{type(model).__name__}: {what} uses a tensor that requires a gradient and is not a "
        f"parameter of the model, so a graph would not compute its gradient. Make it a parameter of the "
        f"model, or pass it as an argument"
    )
