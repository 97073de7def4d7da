"""Export of a PyTorch model to an ONNX graph that keeps every custom Function.

model + sample ─ io_schema ─► tensors ─ trace ─► ExportedProgram + sites
─ symbolics ─► ONNX with PythonOp nodes ─ shape_infer ─► ExportedModel
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.capture.dim_specs import flat_dim_specs
from torch2ort.capture.plain_tensors import as_plain_leaf, refuse_tensors
from torch2ort.capture.sample_call import Call
from torch2ort.capture.torch_modes import Modes
from torch2ort.errors import ExportError
from torch2ort.exported_model import ExportedModel
from torch2ort.exports.build import build
from torch2ort.graph.graph import Graph
from torch2ort.graph.node_provenance import kernels_said
from torch2ort.graph.refinements import kernels_in_files
from torch2ort.graph.weights import freeze
from torch2ort.log import apply_level
from torch2ort.options import Options, with_arguments
from torch2ort.portable.weight_functions import computed
from torch2ort.refuse_torch_onnx_calls import refuses_habits
from torch2ort.support.startup_timing import TRACE, Startup
from torch2ort.support.user_warnings import warn
from torch2ort.training.ort_targets import target_of
from torch2ort.variants.parallel.gather_weights import whole


@refuses_habits
def export(
    model: torch.nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    training: bool | None = None,
    portable: bool = False,
    opset: int | None = None,
    cache_dir: str | os.PathLike[str] | bool | None = None,
    options: Options | None = None,
) -> ExportedModel:
    """Export ``model`` to ONNX; every call of a custom Function becomes a ``PythonOp`` node.

    The export does not change the model, its parameters, buffers, hooks and mode, the random state and
    ``Function.apply``, also if it raises.

    Args:
        model: any module that torch.export can trace (non-strict).
        sample: the arguments of the sample call: a tuple of positional arguments, a dict of keyword
            arguments, or any other object as the only positional argument. Arguments may be nested.
        kwargs: keyword arguments in addition to a tuple ``sample``.
        dynamic_shapes: as for ``torch.export.export``, or with names of sizes as for ``torch.onnx.export``:
            ``{"x": {0: "batch"}}``, ``{"x": ["batch", None]}``. The bounds of a name are those that the model
            requires, which are logged at INFO; the model must accept the bounds of a ``Dim``. ``None`` fixes
            every size to that of the sample.
        training: the mode to export; ``None`` means ``model.training``.
        portable: whether the file can run in any runtime, without Python: each call of a Function is a node
            named after the Function, and the file contains its body. The exported mode is evaluation,
            whatever the model's mode is.
        opset: ONNX opset, from 18 to the highest that the installed onnx and onnxruntime both support; 18 by
            default.
        cache_dir: folder of the export cache; ``None`` means the user's cache folder, ``False`` no cache.
        options: further settings.

    Returns:
        The exported model, with the current weights.

    Raises:
        ExportError: the model cannot be exported; the message names the place and the reason. Or the call has
            arguments of ``torch.onnx.export``; the message has the call to write instead. Or a Function is
            not portable.
        UnsupportedOperatorError: an operator has no translation, or, for a portable file, no operators of
            ONNX.
        SchemaError: an argument or output is of a kind that cannot be flattened.
        OptionError: an option is not allowed.
    """
    options = with_arguments(options, opset=opset, cache_dir=cache_dir)
    return _exported(model, sample, kwargs, dynamic_shapes, training, options, portable=portable)


def export_unfolded(model: torch.nn.Module, sample: Any, dynamic_shapes: Any) -> ExportedModel:
    """Export in evaluation mode without folding weights, for a file that is trained further."""
    return _exported(model, sample, None, dynamic_shapes, False, with_arguments(None), folds=False)


def _exported(
    model: torch.nn.Module,
    sample: Any,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    training: bool | None,
    options: Options,
    *,
    folds: bool = True,
    portable: bool = False,
) -> ExportedModel:
    apply_level(options)
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"export: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(portable, bool):
        raise ExportError(f"export: portable is {portable!r}; expected True or False")
    if portable:
        if training:
            raise ExportError(
                "export: portable=True is for inference, and training is True; leave out training, or pass "
                "training=False"
            )
        training = False
    args, keywords = _arguments(sample, kwargs)
    signature = io_schema.Signature.of(model.forward)
    _check_mode(training)
    bound = signature.bind(args, keywords)
    tensors, schema = io_schema.flatten(bound)
    refuse_tensors(tensors, schema)
    tensors = [as_plain_leaf(t) for t in tensors]
    dim_specs = flat_dim_specs(bound, dynamic_shapes, len(tensors))
    call = Call(signature, tensors, schema, Modes.now(), dim_specs)
    startup = Startup(type(model).__name__)
    with whole(model):
        with startup.recording(TRACE):
            target = replace(target_of(options), give_bodies=_give_bodies if portable else None)
            program = build(model, call, training=training, target=target, options=options)
        graph, weights = program.graph, program.weights
        if portable:
            graph, weights = computed(graph, weights, options)
        graph, weights = freeze(graph, weights, folds=folds)
    startup.log(logging.INFO)
    _tell_kernels(graph)
    return ExportedModel(
        graph,
        weights,
        program.interface,
        training=program.training,
        options=options,
        cache=program.report,
        folds=folds,
    )


def _give_bodies(*arguments: Any) -> Graph:
    # The modules that trace are slow to import, and a start from the cache does not trace.
    from torch2ort.portable.portable_graph import portable

    return portable(*arguments)


def _tell_kernels(graph: Graph) -> None:
    """Warn of kernels that a plain session cannot run by itself."""
    kernels = kernels_said(kernels_in_files(graph.proto.graph), graph.sites)
    if kernels:
        warn(
            f"ONNX has no operators for {kernels}: the graph calls PyTorch's kernels, which a plain "
            f"onnxruntime.InferenceSession finds only in torch2ort's library. Run the file with "
            f"torch2ort.load, or register a translation with torch2ort.register_symbolic"
        )


def _check_mode(training: Any) -> None:
    if training is not None and not isinstance(training, bool):
        raise ExportError(
            f"export: training is {training!r}; expected True, False, or None for the model's own mode"
        )


def _arguments(sample: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(sample) is tuple:
        return sample, dict(kwargs or {})
    if type(sample) is dict:
        return (), {**sample, **(kwargs or {})}
    return (sample,), dict(kwargs or {})
