"""One export: traced, translated and measured, unless the export cache has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.key import INLINES_FUNCTIONS
from torch2ort.capture.export_patches import backward_hook
from torch2ort.capture.plain_tensors import refuse_untraceable
from torch2ort.capture.sample_call import Call, DimSpec, Purpose
from torch2ort.capture.torch_modes import traceable_modes
from torch2ort.capture.trace import Trace, trace
from torch2ort.errors import ExportError
from torch2ort.exports.export_cache import reuse_or_build
from torch2ort.exports.graph_of_trace import form_of, graph_of_trace, log_graph
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.debug_dumps import save_stage
from torch2ort.graph.graph import GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.log import logger, quiet
from torch2ort.options import Options
from torch2ort.program.autocast_casts import settle_autocast
from torch2ort.program.detach_range_bounds import detach_bounds
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.program.traced_program import TracedProgram, kept_program, traced_program
from torch2ort.pythonop.autocast import off
from torch2ort.support.later import Later
from torch2ort.support.startup_timing import TRACE, TRANSLATE, phase
from torch2ort.symbolics import check
from torch2ort.symbolics.lowering import lower, signature_of, sizes_of


def build(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    target: Target,
    options: Options,
    any_sizes: bool = True,
) -> Program:
    """The program of one call, out of the export cache or exported: what ``export`` and ``ORTModule`` share.

    Args:
        model: the model.
        call: the sample call.
        training: the mode; ``None`` takes ``model.training``.
        target: what the graph is for.
        options: cache and debugging.
        any_sizes: whether a graph of the cache serves an ORTModule in which more sizes vary than asked for.

    Raises:
        ExportError: see :func:`export`.
    """
    refuse_untraceable(model)
    target = replace(target, training=model.training if training is None else training)
    hooked = backward_hook(model)
    if target.is_trained and hooked is not None:
        _refuse_hook(model, hooked)
    settings = {
        "modes of PyTorch": call.modes.description(),
        "opset": target.opset,
        "mode": training,
        "gradients": target.gradients.source.name,
        "rounds as eager": target.rounds_as_eager,
        "operators of libraries": target.has_libraries,
        "hooks of the model": call.purpose is Purpose.FILE,
        "numbers as inputs": sorted(call.numbers),
        "identical inputs": list(call.same),
        INLINES_FUNCTIONS: target.inlines_functions,
    }

    def afresh(call: Call = call) -> Program:
        return _export(model, call, training=training, target=target, options=options)

    any_sizes &= call.purpose is Purpose.MODULE
    program = reuse_or_build(model, call, settings, options, afresh, any_sizes=any_sizes)
    if target.is_trained and program.traced is None:
        again = call._replace(dim_specs=_dim_specs(program.interface.sizes))
        zeros = _zeros(again)
        program = replace(
            program,
            traced=Later(lambda: _traced_again(program, afresh(again))),
            onnx=Later(lambda: afresh(zeros()).graph),
        )
    return program


def _zeros(call: Call) -> Callable[[], Call]:
    """Makes a call of zeros that is like another one, and does not hold its tensors."""
    forms = [form_of(tensor) for tensor in call.tensors]
    call = call._replace(tensors=[])

    def make() -> Call:
        with torch.no_grad():
            return call._replace(tensors=[form().zero_() for form in forms])

    return make


def _dim_specs(sizes: Sizes) -> list[DimSpec]:
    """What to ask torch.export for, so that the same sizes vary."""
    varying = torch.export.Dim.AUTO
    return [{i: varying for i, d in enumerate(dims) if isinstance(d, str)} or None for dims in sizes.dims]


def _export(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    target: Target,
    options: Options,
) -> Program:
    """Trace, translate and infer shapes."""
    with phase(TRACE), quiet(), exclusive.exporting(), traceable_modes(call.modes):
        traced = trace(model, call, training=training, fixed_sizes=target.is_trained)
        if target.is_trained and traced.hooked:
            _refuse_hook(model, f"{traced.hooked} puts a hook on a gradient,")
        # In a model that trains nothing of its own, too, a result of ORTModule would require no gradient.
        lost = call.modes.gradients and call.purpose is Purpose.MODULE and any(traced.ties.tracked)
        if traced.outside and (target.is_trained or lost):
            _refuse_outside(model, traced.outside)
        with off():
            sites = settle_autocast(
                traced.program.graph_module, model, target, gradients=call.modes.gradients
            )
            traced.sites.update({site.key: site for site in sites})
            detach_bounds(traced.program.graph_module)
            return _program(model, call, traced, target, options)


def _program(model: torch.nn.Module, call: Call, traced: Trace, target: Target, options: Options) -> Program:
    """The program of a trace; the graph of one that is trained is translated once somebody asks for it."""
    name = type(model).__name__
    copied = operators = onnx = None
    if target.is_trained:
        check(traced.program, target)
        signature, weights = signature_of(model, traced, call.schema)
        copied = kept_program(traced)
    if copied is None or options.save_onnx_dir is not None:
        with phase(TRANSLATE):
            graph, weights = lower(model, traced, call.schema, target)
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
        traced=None if operators is None else Later(lambda: operators),
        onnx=onnx,
    )


def _writer(signature: GraphSignature, traced: Trace) -> str | None:
    """The first Function that writes to objects, empty where the model writes; ``None`` if none does."""
    functions = (site.func_name for site in traced.sites.values() if site.known_result.effects)
    return "" if signature.mutations else next(functions, "" if traced.effects else None)


def _interface(call: Call, traced: Trace, signature: GraphSignature) -> Interface:
    sizes = sizes_of(traced, signature.inputs)
    return Interface(call.signature, call.schema, traced.output_schema, sizes, traced.returned, call.same)


def _traced_again(stored: Program, again: Program) -> TracedProgram:
    """The program of a second export, which must be that of the graph.

    Raises:
        ExportError: it is another one.
    """
    assert again.traced is not None
    for found, kept in (
        (_accepted(again.interface.sizes), _accepted(stored.interface.sizes)),
        (again.signature, stored.signature),
    ):
        if found != kept:
            raise ExportError(
                f"the export cache has another graph of this model than it is exported to ({kept} became "
                f"{found}). Clear the cache with python -m torch2ort cache clear"
            )
    return again.traced.get()


def _accepted(sizes: Sizes) -> Any:
    """The sizes that a graph accepts; torch names those that vary anew in each trace."""
    names: dict[str, int] = {}
    dims = [[d if isinstance(d, int) else names.setdefault(d, len(names)) for d in ds] for ds in sizes.dims]
    ranges = sorted(([names.get(name, -1), *bounds] for name, bounds in sizes.ranges.items()), key=str)
    return dims, ranges, sizes.guards


def _refuse_outside(model: torch.nn.Module, what: str) -> None:
    raise ExportError(
        f"{type(model).__name__}: {what} uses a tensor that requires a gradient and is no "
        f"parameter of the model, so that a graph would give it none. Make it a parameter of the "
        f"model, or pass it as an argument"
    )


def _refuse_hook(model: torch.nn.Module, what: str) -> None:
    raise ExportError(
        f"{type(model).__name__}: {what} which a graph cannot call. Hooks of the model itself and of its "
        f"parameters work; for others put the computation into the backward of a torch.autograd.Function"
    )
