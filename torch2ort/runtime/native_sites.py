"""Sites bound to classes: the native side of a session's PythonOp nodes.

The graph in a file contains names. A session gets a copy of the graph in which every PythonOp node refers,
by a key of its own, to a native site with the class, the exact constants and the call policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from torch2ort.errors import ExportError, UnsupportedOperatorError
from torch2ort.fusion.region_function import FusedRegion
from torch2ort.kernels.functions import AtenKernel
from torch2ort.kernels.library import LibraryKernel
from torch2ort.kernels.native_calls import DirectArguments, direct_arguments
from torch2ort.pythonop import TENSOR, Site, UnstoredObject, uses_setup_context
from torch2ort.pythonop.abstract_run.per_call_arguments import with_copied_arguments
from torch2ort.pythonop.autocast import with_autocast
from torch2ort.pythonop.caught_exceptions import with_caught_exceptions_reported
from torch2ort.pythonop.native import backward_of, native, note_exported
from torch2ort.pythonop.runtime_checks import with_runtime_checks
from torch2ort.runtime.custom_op.in_place import InplacePlan

if TYPE_CHECKING:
    # With sympy they import slowly, and most graphs have no region.
    from torch2ort.fusion.library_loader import NativeRegion
    from torch2ort.fusion.region import Size

# The callee of a node.
Callee = native.Site | native.Chain | native.DirectCall


def native_site(
    site: Site,
    key: str,
    *,
    training: bool,
    plan: InplacePlan,
    originals: Mapping[int, int] | None = None,
) -> native.Site:
    """Build the native counterpart of ``site``.

    Args:
        site: resolved to a class.
        key: name of the native site, unique in the process.
        training: whether contexts are saved for a backward.
        plan: the in-place maps in force.
        originals: argument position -> position among a run's originals.

    Raises:
        ExportError: an argument is an object that the file with the site cannot contain.
    """
    function = site.function
    if function is None:
        raise ExportError(f"{site.func_name}: this Function is not resolved to a class, so it cannot run")
    for position, value in site.constants.items():
        if isinstance(value, UnstoredObject):
            raise ExportError(
                f"{site.func_name}: argument {position} is {value!r}; export the model in this process"
            )
    result = site.known_result
    outputs = result.outputs
    tensor_outputs = tuple(i for i, v in enumerate(outputs) if v is TENSOR)
    forward, setup_context, backward = _callables(site, function)
    bound = native.Site(
        key=key,
        name=site.func_name,
        forward=forward,
        setup_context=setup_context,
        backward=backward,
        arguments=tuple(None if v is TENSOR else v for v in site.arguments),
        tensor_positions=site.tensor_positions,
        needs_input_grad=site.needs_input_grad,
        input_dtypes=tuple(_name(t.dtype) for t in result.inputs),
        outputs=tuple(None if v is TENSOR else v for v in outputs),
        tensor_outputs=tensor_outputs,
        output_dtypes=tuple(_name(t.dtype) for t in result.tensors),
        output_ranks=tuple(t.rank for t in result.tensors),
        returns_tuple=result.returns_tuple,
        # A site counts only its tensor outputs; the native side counts all values that forward returns.
        non_differentiable=tuple(
            tensor_outputs[i] for i in result.non_differentiable if i < len(tensor_outputs)
        ),
        mutated=result.mutated,
        training=training,
        forward_map=dict(plan.forward),
        backward_map=dict(plan.backward),
        # PyTorch's own kernels keep no references to tensors, and do not write to gradients.
        probed=not site.internal or site.function is LibraryKernel,
        originals=dict(originals or {}),
    )
    note_exported(bound, site)
    return bound


# By the key of the site: argument position -> position of the feed that forward gets itself.
OriginalFeeds = Mapping[str, Mapping[int, int]]


def original_feeds(
    graph: onnx.GraphProto, sites: Mapping[str, Site], feeds: Mapping[str, int]
) -> OriginalFeeds:
    """Return the fed tensors that Functions get themselves, instead of copies.

    Args:
        graph: a graph with PythonOp nodes.
        sites: the site of each of them, by node name.
        feeds: position of the feed of each graph input.
    """
    found: dict[str, dict[int, int]] = {}
    for node in graph.node:
        site = sites.get(node.name)
        if site is None or not site.originals:
            continue
        result = site.known_result
        # A write to an argument must go through the graph, as other nodes read the tensor.
        written = {*result.mutated, *(argument for _, argument in result.forward_map)}
        for name, argument in zip(node.input, site.tensor_positions, strict=True):
            if argument in site.originals and argument not in written and name in feeds:
                found.setdefault(site.key, {})[argument] = feeds[name]
            elif argument in site.written_back:
                raise UnsupportedOperatorError(
                    f"{site.func_name}: backward writes to argument {argument}, which the model changed in "
                    f"front of the call, and a graph loses that. Change it behind the call, or return the "
                    f"value from forward"
                )
    return found


def runs_directly(site: Site) -> bool:
    """Return True if a node of the custom operator calls ``site`` in C++, as far as the site shows."""
    return _native_region(site) is not None or _direct_arguments(site) is not None


def directly(site: Site, bound: native.Site) -> native.Site | native.DirectCall:
    """Return the callee of a node of the custom operator: a direct call in C++ where it is supported.

    Args:
        site: the call.
        bound: its native counterpart.
    """
    region = _native_region(site)
    if region is not None:
        return native.DirectCall.of_region(
            site=bound,
            address=region.address,
            inputs=[_known(sizes) for _, sizes in region.region.inputs],
            outputs=[_known(sizes) for _, sizes in region.program.outputs],
            temporaries=list(_known(region.program.temporaries)),
            numbers=region.numbers,
            varying=list(region.region.varying.values()),
        )
    found = _direct_arguments(site)
    if found is None:
        return bound
    try:
        return native.DirectCall(
            site=bound,
            operator=found.operator,
            overload=found.overload,
            arguments=found.arguments,
            results=found.results,
            function=found.function,
            numbers=list(found.numbers),
            written=found.written,
            grad_mode=found.grad_mode,
        )
    except NotImplementedError:
        return bound


def _known(sizes: Sequence[Size]) -> tuple[int, ...]:
    """Return the sizes with -1 for each that varies, which the region's library computes."""
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def _native_region(site: Site) -> NativeRegion | None:
    """Return the fused region of the call, if this process has its library for the site's dtypes."""
    if site.function is not FusedRegion:
        return None
    from torch2ort.fusion.compiled_regions import native_of

    found = native_of(site.arguments[0])
    if found is None:
        return None
    result = site.known_result
    given, made = ([t.dtype for t in tensors] for tensors in (result.inputs, result.tensors))
    expected = [dtype for dtype, _ in found.region.inputs], [dtype for dtype, _ in found.program.outputs]
    return found if (given, made) == expected else None


def _direct_arguments(site: Site) -> DirectArguments | None:
    """Return the arguments of a direct call, if the call has no effect besides its result."""
    result = site.known_result
    if site.function is not AtenKernel or any(site.needs_input_grad) or site.fresh:
        return None
    if (site.autocast is not None and site.autocast.is_on) or result.checked:
        return None
    if result.mutated or result.forward_map:
        return None
    return direct_arguments(site.arguments[0], tuple(t.dtype for t in result.inputs))


def _callables(site: Site, function: type[torch.autograd.Function]) -> tuple[Any, Any, Any]:
    """Return the functions of the native site: forward, setup_context (or ``None``) and backward."""
    backward = backward_of(function)
    setup_context = None
    if uses_setup_context(function):
        setup_context = with_autocast(site.autocast, function.setup_context)
    forward = with_autocast(site.autocast, function.forward)
    if site.caught:
        caller = "an operator" if site.internal else f"{site.func_name}.forward"
        forward = with_caught_exceptions_reported(caller, site.caught, forward)
    if site.fresh:
        forward, setup_context = with_copied_arguments(site, forward, setup_context), None
    if not site.known_result.checked:
        return forward, setup_context, backward
    return *with_runtime_checks(site, forward, setup_context), backward


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
