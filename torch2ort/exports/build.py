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
from torch2ort.capture.sample_call import Call, DimSpec
from torch2ort.capture.torch_modes import traceable_modes
from torch2ort.capture.trace import Trace, trace
from torch2ort.errors import ExportError
from torch2ort.exports.export_cache import reuse_or_build
from torch2ort.exports.export_result import Built
from torch2ort.exports.lazy_graph import LazyGraph, form_of, lazy_graph, log_graph
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.debug_dumps import save_stage
from torch2ort.graph.graph import GraphSignature
from torch2ort.graph.interface import Interface
from torch2ort.log import logger, quiet
from torch2ort.options import Options
from torch2ort.program.autocast_casts import settle_autocast
from torch2ort.program.detach_range_bounds import detach_bounds
from torch2ort.program.target import Target
from torch2ort.program.traced_program import Program, Source, kept_program, source_of
from torch2ort.pythonop.autocast import off
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
    with_hooks: bool = True,
    any_sizes: bool = True,
) -> Built:
    """The graph of one call, out of the export cache or exported: what ``export`` and ``ORTModule`` share.

    Args:
        model: the model.
        call: the sample call.
        training: the mode; ``None`` takes ``model.training``.
        target: what the graph is for.
        options: cache and debugging.
        with_hooks: whether hooks of the model itself are part of the graph.
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
        "hooks of the model": with_hooks,
        "numbers as inputs": sorted(call.numbers),
        "identical inputs": list(call.same),
        INLINES_FUNCTIONS: target.inlines_functions,
    }

    def afresh(call: Call = call) -> Built:
        return _export(
            model,
            call,
            training=training,
            target=target,
            options=options,
            with_hooks=with_hooks,
        )

    # ORTModule, which runs the hooks itself, takes any graph that holds for the call.
    built = reuse_or_build(model, call, settings, options, afresh, any_sizes=any_sizes and not with_hooks)
    if target.is_trained and built.program is None:
        again = call._replace(dim_specs=_dim_specs(built.interface.sizes))
        zeros = _zeros(again)
        built = replace(
            built,
            program=Program(lambda: _traced_again(built, afresh(again))),
            lazy=LazyGraph(lambda: afresh(zeros()).graph),
        )
    return built


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
    with_hooks: bool,
) -> Built:
    """Trace, translate and infer shapes."""
    with phase(TRACE), quiet(), exclusive.exporting(), traceable_modes(call.modes):
        traced = trace(
            model,
            call,
            training=training,
            with_hooks=with_hooks,
            leaves=not with_hooks,
            fixed_sizes=target.is_trained,
            has_originals=not with_hooks,
        )
        if target.is_trained and traced.hooked:
            _refuse_hook(model, f"{traced.hooked} puts a hook on a gradient,")
        # In a model that trains nothing of its own, too, a result of ORTModule would require no gradient.
        lost = call.modes.gradients and not with_hooks and any(traced.ties.tracked)
        if traced.outside and (target.is_trained or lost):
            _refuse_outside(model, traced.outside)
        with off():
            sites = settle_autocast(
                traced.program.graph_module, model, target, gradients=call.modes.gradients
            )
            traced.sites.update({site.key: site for site in sites})
            detach_bounds(traced.program.graph_module)
            return _built(model, call, traced, target, options)


def _built(model: torch.nn.Module, call: Call, traced: Trace, target: Target, options: Options) -> Built:
    """The graph of a trace; of one that is trained the program, and the graph once somebody asks for it."""
    name = type(model).__name__
    program = source = lazy = None
    if target.is_trained:
        check(traced.program, target)
        signature, weights = signature_of(model, traced, call.schema)
        program = kept_program(traced)
    if program is None or options.save_onnx_dir is not None:
        with phase(TRANSLATE):
            graph, weights = lower(model, traced, call.schema, target)
        save_stage(options, f"{name}_exported", graph.proto)
        log_graph(name, graph)
        signature = graph
    interface = _interface(call, traced, signature)
    if program is not None:
        source = source_of(program, traced, signature)
        logger.info("traced %s: %d operators", name, len(program.graph.nodes))
        if options.save_onnx_dir is None:
            lazy = lazy_graph(model, traced, call.schema, target)
    return Built(
        signature,
        weights,
        interface,
        target.training,
        traced.ties,
        effects=traced.effects,
        writer=_writer(signature, traced),
        program=None if source is None else Program(lambda: source),
        lazy=lazy,
    )


def _writer(signature: GraphSignature, traced: Trace) -> str | None:
    """The first Function that writes to objects, empty where the model writes; ``None`` if none does."""
    functions = (site.func_name for site in traced.sites.values() if site.known_result.effects)
    return "" if signature.mutations else next(functions, "" if traced.effects else None)


def _interface(call: Call, traced: Trace, signature: GraphSignature) -> Interface:
    sizes = sizes_of(traced, signature.inputs)
    return Interface(call.signature, call.schema, traced.output_schema, sizes, traced.returned, call.same)


def _traced_again(built: Built, again: Built) -> Source:
    """The program of a second export, which must be that of the graph.

    Raises:
        ExportError: it is another one.
    """
    assert again.program is not None
    for found, kept in (
        (_accepted(again.interface.sizes), _accepted(built.interface.sizes)),
        (again.signature, built.signature),
    ):
        if found != kept:
            raise ExportError(
                f"the export cache has another graph of this model than it is exported to ({kept} became "
                f"{found}). Clear the cache with python -m torch2ort cache clear"
            )
    return again.program.source()


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
