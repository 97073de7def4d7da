"""The export of an ORTModule's call: for varying sizes if some vary, else for the sizes of the call alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from torch2ort.cache.key.key import Dependencies, named_tensors, tensor_of
from torch2ort.capture.plain_tensors import as_plain_leaf
from torch2ort.capture.sample_call import Call, DimSpec, Purpose
from torch2ort.errors import ExportError
from torch2ort.exports.build import build
from torch2ort.log import logger
from torch2ort.options import Options, with_arguments
from torch2ort.training.device_providers import on_their_device
from torch2ort.training.ort_targets import inference_target, training_target
from torch2ort.variants.live_weights import PresentWeights
from torch2ort.variants.shape_variants import Family, Shapes, Variant


def export_variant(
    model: torch.nn.Module,
    options: Options,
    family: Family,
    call: Call,
    shapes: Shapes,
    found: Callable[[], Dependencies],
) -> Variant:
    """Export a graph that accepts a call, and add it to the graphs of the model's state.

    Args:
        model: the model.
        options: the module's settings.
        family: the graphs of the model's state.
        call: the call.
        shapes: the shapes of the call's tensors.
        found: returns the dependencies of a graph of the model.

    Raises:
        ExportError: the call cannot be a graph; the error names the reason.
        UnsupportedOperatorError: one of its operators cannot be in a graph.
        OptionError: the options do not match the device of the tensors.
        RuntimeNotFoundError: the installed onnxruntime does not support that device.
    """
    tensors = (*call.tensors, *named_tensors(model).values())
    options = on_their_device(options, tensors, type(model).__name__)
    why = family.why_another(shapes)
    if why:
        logger.warning(
            "%s: the graph for sizes that vary does not serve this call: %s", type(model).__name__, why
        )
    export = functools.partial(_variant, model, options, found)
    variant = _for_varying_sizes(export, family, call, shapes)
    if variant is None:
        variant = _for_these_sizes(export, call)
    variant.program.effects.apply_one_time_writes()
    family.variants.append(variant)
    family.by_shapes[shapes] = variant
    return variant


def _for_varying_sizes(
    export: Callable[..., Variant], family: Family, call: Call, shapes: Shapes
) -> Variant | None:
    """Export a variant for varying sizes; return ``None`` if no size varies, or no such export succeeds."""
    choices = [choice for choice in family.varying(shapes) if choice not in family.refused]
    family.seen.append(shapes)
    for varying in choices:
        try:
            variant = export(call, varying)
            if not _fits(variant, shapes):
                continue
        except Exception as error:
            # Not only torch2ort's errors: a symbolic size breaks code that runs with each of its values.
            logger.info("no graph for varying sizes (%s); exporting for fewer", error)
            family.refused.append(varying)
        else:
            return variant
    return None


def _for_these_sizes(export: Callable[..., Variant], call: Call) -> Variant:
    """Export a variant for the call's sizes, which may accept others, too."""
    fixed = [None] * len(call.tensors)
    variant = export(call, fixed)
    try:
        if _fits(variant, tuple(tensor.shape for tensor in call.tensors)):
            return variant
    except Exception as error:
        logger.info("the graph for varying sizes in the cache cannot be trained (%s)", error)
    return export(call, fixed, any_sizes=False)


def _fits(variant: Variant, shapes: Shapes) -> bool:
    """Return True if a graph accepts some sizes, and so do its derivatives, if it trains and sizes vary."""
    if variant.program.interface.sizes.mismatch(shapes) is not None:
        return False
    if variant.varies and variant.requires_grad and variant.program.traced is not None:
        variant.narrow()
    return variant.program.interface.sizes.mismatch(shapes) is None


def _variant(
    model: torch.nn.Module,
    options: Options,
    found: Callable[[], Dependencies],
    call: Call,
    dim_specs: Sequence[DimSpec],
    *,
    any_sizes: bool = True,
) -> Variant:
    tensors, modes = call.tensors, call.modes
    # New tensors for each attempt: a failing torch.export leaves marks on them.
    samples = [as_plain_leaf(t) for t in tensors]
    trained = modes.gradients and any(
        t.requires_grad for t in (*samples, *model.parameters(), *model.buffers())
    )
    program = build(
        model,
        call._replace(tensors=samples, dim_specs=dim_specs, purpose=Purpose.MODULE),
        training=None,
        target=training_target(options) if trained else inference_target(options),
        options=options,
        any_sizes=any_sizes,
        found=found,
    )
    if not modes.gradients and program.ties.any_requires_gradient_itself():
        raise ExportError(
            f"{type(model).__name__}: forward was called with gradients switched off, switches them "
            f"on itself and returns a tensor that requires one, which a graph cannot do. Call the model "
            f"with gradients switched on, or return the detach() of what needs none"
        )
    requires_grad = {n for n, t in zip(program.signature.inputs, tensors, strict=True) if t.requires_grad}
    requires_grad |= {n for n, t in program.weights.items() if t.requires_grad}
    # The module's tensors are looked up in each call, as they may be replaced by others.
    constants = {
        n: t for n, t in program.weights.items() if tensor_of(model, program.signature.weights[n]) is None
    }
    weights = PresentWeights(model, program.signature.weights, constants)
    program = replace(program, weights=constants)
    options = with_arguments(options, deterministic=True if modes.deterministic else None)
    wanted = frozenset(requires_grad) if modes.gradients else frozenset()
    return Variant(program, weights, wanted, options, name=type(model).__name__)
