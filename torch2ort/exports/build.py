"""One export: traced and translated, unless the export cache contains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torch2ort.cache.key.key import Dependencies, dependencies
from torch2ort.capture.gradient_hooks import backward_hook, hook_refused
from torch2ort.capture.plain_tensors import refuse_untraceable
from torch2ort.capture.sample_call import Call, DimSpec, Purpose
from torch2ort.errors import ExportError
from torch2ort.exports.export_cache import reuse_or_build
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import Target
from torch2ort.program.traced_program import TracedProgram
from torch2ort.sizes.memory_layout import form_of
from torch2ort.support.lazy import Lazy
from torch2ort.support.startup_timing import IMPORTS, phase


def build(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    target: Target,
    options: Options,
    any_sizes: bool = True,
    found: Callable[[], Dependencies] | None = None,
) -> Program:
    """Return the program of one call, from the export cache or exported, for ``export`` and ``ORTModule``.

    Args:
        model: the model.
        call: the sample call.
        training: the mode; ``None`` means ``model.training``.
        target: the target of the graph.
        options: settings of the cache and of debugging.
        any_sizes: whether a cached graph with more varying sizes than requested may serve an ORTModule.
        found: returns the dependencies of the graph, if the caller knows them; else they are searched in the
            model.

    Raises:
        ExportError: see :func:`export`.
    """
    refuse_untraceable(model)
    target = replace(target, training=model.training if training is None else training)
    hooked = backward_hook(model)
    if target.is_trained and hooked is not None:
        raise hook_refused(model, hooked)
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
        "inlines Functions": target.inlines_functions,
        "portable": target.give_bodies is not None,
    }
    # These graphs contain the operators of Functions, so they depend on the code of forward.
    inlines = target.inlines_functions or target.give_bodies is not None
    found = found or (lambda: dependencies(model, call.tensors, call.schema, inlines_functions=inlines))

    def afresh(call: Call = call) -> Program:
        # The modules that trace are slow to import, and are not needed for a cached graph.
        with phase(IMPORTS):
            from torch2ort.exports.export_call import export_call

        return export_call(model, call, training=training, target=target, options=options)

    any_sizes &= call.purpose is Purpose.MODULE
    program = reuse_or_build(model, call, found, settings, options, afresh, any_sizes=any_sizes)
    if target.is_trained and program.traced is None:
        again = call._replace(dim_specs=_dim_specs(program.interface.sizes))
        zeros = _zeros(again)
        program = replace(
            program,
            traced=Lazy(lambda: _traced_again(program, afresh(again))),
            onnx=Lazy(lambda: afresh(zeros()).graph),
        )
    return program


def _zeros(call: Call) -> Callable[[], Call]:
    """Return a function that makes a call like ``call`` with zeros; it does not hold the call's tensors."""
    forms = [form_of(tensor) for tensor in call.tensors]
    call = call._replace(tensors=[])

    def make() -> Call:
        with torch.no_grad():
            return call._replace(tensors=[form().zero_() for form in forms])

    return make


def _dim_specs(sizes: Sizes) -> list[DimSpec]:
    """Return the dynamic shapes for torch.export with which the same sizes vary."""
    varying = torch.export.Dim.AUTO
    return [{i: varying for i, d in enumerate(dims) if isinstance(d, str)} or None for dims in sizes.dims]


def _traced_again(stored: Program, again: Program) -> TracedProgram:
    """Return the program of a second export; it must have the sizes and the signature of the stored graph.

    Raises:
        ExportError: they differ.
    """
    assert again.traced is not None
    for found, kept in (
        (_accepted(again.interface.sizes), _accepted(stored.interface.sizes)),
        (again.signature, stored.signature),
    ):
        if found != kept:
            raise ExportError(
                f"the export cache has another graph of this model than a new export ({kept} became "
                f"{found}). Clear the cache with python -m torch2ort cache clear"
            )
    return again.traced.get()


def _accepted(sizes: Sizes) -> Any:
    """Return the sizes that a graph accepts, without torch's names of sizes, which differ in each trace."""
    names: dict[str, int] = {}
    dims = [[d if isinstance(d, int) else names.setdefault(d, len(names)) for d in ds] for ds in sizes.dims]
    ranges = sorted(([names.get(name, -1), *bounds] for name, bounds in sizes.ranges.items()), key=str)
    return dims, ranges, sizes.guards
