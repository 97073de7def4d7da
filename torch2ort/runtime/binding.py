"""Sites bound to classes: the native side of a session's PythonOp nodes.

The file's graph holds names. A session gets a copy of the graph in which every PythonOp node refers,
by a key of its own, to a native site that holds the class, the exact constants and the call policy.
A graph that the cache keeps calls each site by its node's name, which is the key if no other session has it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from torch2ort.errors import EngineError, ExportError, UnsupportedOperatorError
from torch2ort.graph.nodes import function_of, python_op_nodes
from torch2ort.kernels.direct import DirectArguments, direct_arguments
from torch2ort.kernels.functions import AtenKernel
from torch2ort.kernels.library import LibraryKernel
from torch2ort.kernels.regions.function import FusedRegion
from torch2ort.kernels.regions.library import native_of
from torch2ort.kernels.regions.region import Size
from torch2ort.kernels.regions.shared import NativeRegion
from torch2ort.pythonop import TENSOR, Site, UnstoredObject, uses_setup_context
from torch2ort.pythonop.abstract_run.anew import anew
from torch2ort.pythonop.abstract_run.backward import backward_of
from torch2ort.pythonop.autocast import under
from torch2ort.pythonop.caught import told
from torch2ort.pythonop.native import native, note_exported
from torch2ort.pythonop.own_gradient import own_gradient
from torch2ort.pythonop.unobserved import watched
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.chains import Chain
from torch2ort.runtime.inplace import InplacePlan
from torch2ort.runtime.training_kernel.context_table import pool

# What a node of onnxruntime-training calls, and one of the custom operator.
TrainingCallee = native.Site | native.Chain
Callee = TrainingCallee | native.DirectCall

_serial = itertools.count()
# Names of nodes that are a key -> its number. For good, as onnxruntime keeps what was registered.
_first: dict[str, int] = {}

# Of a node of a file, what onnxruntime-training's kernel gets to see; never an address.
_KEPT_ATTRIBUTES = frozenset(
    (
        "comment", "input_tensor_ranks", "input_tensor_types", "output_tensor_ranks", "output_tensor_types",
        "safe_run_mode", "tensor_reuse_map", "bw_tensor_reuse_map",
    )
)  # fmt: skip


def native_site(
    site: Site,
    key: str,
    *,
    training: bool,
    protected: tuple[int, ...],
    plan: InplacePlan,
    originals: Mapping[int, int] | None = None,
) -> native.Site:
    """The native counterpart of ``site``.

    Args:
        site: resolved to a class.
        key: name of the native site, unique in the process.
        training: whether contexts are kept for a backward.
        protected: argument positions whose memory the session's graph never overwrites.
        plan: the in-place maps in force.
        originals: argument position -> number among a run's originals.

    Raises:
        ExportError: an argument is an object that the site's file could not hold.
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
        # A site counts its tensor outputs, the native side everything that forward returns.
        non_differentiable=tuple(
            tensor_outputs[i] for i in result.non_differentiable if i < len(tensor_outputs)
        ),
        mutated=result.mutated,
        protected_inputs=protected,
        training=training,
        forward_map=dict(plan.forward),
        backward_map=dict(plan.backward),
        # PyTorch's own kernels keep nothing unseen, and write to no gradient.
        probed=not site.internal or site.function is LibraryKernel,
        overwritten=plan.overwritten,
        originals=dict(originals or {}),
    )
    note_exported(bound, site)
    return bound


# Argument position -> position among what is fed of the tensor that forward gets itself, by the site's key.
OriginalFeeds = Mapping[str, Mapping[int, int]]


def original_feeds(
    graph: onnx.GraphProto, sites: Mapping[str, Site], feeds: Mapping[str, int]
) -> OriginalFeeds:
    """Which of the fed tensors Functions get themselves.

    Args:
        graph: with PythonOp nodes.
        sites: the site of each, by node name.
        feeds: position of each graph input among what is fed.
    """
    found: dict[str, dict[int, int]] = {}
    for node in graph.node:
        site = sites.get(node.name)
        if site is None or not site.originals:
            continue
        result = site.known_result
        # A write to one goes through the graph, which tells other readers of it.
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
    """Whether a node of the custom operator calls ``site`` in C++, as far as the call itself says."""
    return _native_region(site) is not None or _direct_arguments(site) is not None


def directly(site: Site, bound: native.Site) -> native.Site | native.DirectCall:
    """What a node of the custom operator calls for ``site``: in C++ where that can be.

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
        )
    except NotImplementedError:
        return bound


def _known(sizes: Sequence[Size]) -> tuple[int, ...]:
    """Sizes with -1 for each that varies, which the region's library tells."""
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def _native_region(site: Site) -> NativeRegion | None:
    """The fused region that the call is, if a library of this process has it for the site's very types."""
    if site.function is not FusedRegion:
        return None
    found = native_of(site.arguments[0])
    if found is None:
        return None
    result = site.known_result
    given, made = ([t.dtype for t in tensors] for tensors in (result.inputs, result.tensors))
    expected = [dtype for dtype, _ in found.region.inputs], [dtype for dtype, _ in found.program.outputs]
    return found if (given, made) == expected else None


def _direct_arguments(site: Site) -> DirectArguments | None:
    """What the call is made of, if nothing but its result comes of it."""
    result = site.known_result
    if site.function is not AtenKernel or any(site.needs_input_grad) or site.mapped or site.fresh:
        return None
    if (site.autocast is not None and site.autocast.is_on) or result.checked:
        return None
    if result.mutated or result.forward_map:
        return None
    return direct_arguments(site.arguments[0], tuple(t.dtype for t in result.inputs))


@dataclass(frozen=True)
class Bound:
    """What the PythonOp nodes of a session's graph call, for as long as this lives.

    Attributes:
        sites: the native site of each PythonOp node of the exported graph, by node name.
        callees: what each node of the session's graph calls, by node name: such a site, or a chain of them.
    """

    sites: dict[str, native.Site]
    callees: dict[str, TrainingCallee]

    @property
    def functions(self) -> dict[str, str]:
        """The ``func_name`` that reaches what a node calls, by node name."""
        return {name: callee.key for name, callee in self.callees.items()}


def bind_sites(
    sites: Mapping[str, Site],
    plans: Mapping[str, InplacePlan],
    chains: Iterable[Chain],
    *,
    training: bool,
    originals: OriginalFeeds | None = None,
) -> Bound:
    """Make sites callable by onnxruntime-training.

    Args:
        sites: the site of each PythonOp node, by node name.
        plans: the in-place maps in force in the session's graph, by node name.
        chains: sites that one node calls.
        training: whether the session computes gradients.
        originals: see :func:`original_feeds`.
    """
    install_runners()
    bound: dict[str, native.Site] = {}
    for name, site in sites.items():
        # With gradients, the graph keeps these alive and unwritten (see ownership.py).
        protected = site.known_result.kept if training else ()
        plan = plans.get(name, InplacePlan())
        given = (originals or {}).get(site.key)
        bound[name] = native_site(
            site, _key(name), training=training, protected=protected, plan=plan, originals=given
        )
    callees: dict[str, TrainingCallee] = dict(bound)
    for chain in chains:
        members = tuple(bound[name] for name in chain.members)
        for name in chain.members:
            del callees[name]
        callees[chain.name] = native.Chain(key=_key(chain.name), sites=members, links=chain.links)
    for callee in callees.values():
        pool.register(callee)
    return Bound(bound, callees)


def _key(node: str) -> str:
    """A key that nothing else of this process has or had: the node's name, if that is one."""
    number = next(_serial)
    first = "/" not in node and _first.setdefault(node, number) == number
    return node if first else f"{node}/{number}"


def bind_nodes(graph: onnx.GraphProto, sites: Mapping[str, Site], *, training: bool) -> None:
    """Turn the graph's PythonOp nodes into what onnxruntime-training's kernel takes, in place.

    Constants and everything else about the call stay in the native site, so that the node passes
    tensors only. It calls by its own name, see :func:`name_functions`.

    Args:
        graph: a session's copy of an exported graph.
        sites: the site of each PythonOp node, by node name.
        training: whether the session computes gradients.
    """
    for node in graph.node:
        if node.name not in sites:
            continue
        site = sites[node.name]
        kept = [a for a in node.attribute if a.name in _KEPT_ATTRIBUTES]
        positions = site.tensor_positions
        kept += [
            onnx.helper.make_attribute("func_name", node.name),
            onnx.helper.make_attribute("input_convention", "d" * len(positions)),
            onnx.helper.make_attribute(
                "input_requires_grads", [int(site.needs_input_grad[p]) for p in positions]
            ),
            onnx.helper.make_attribute("training_mode", int(training)),
        ]
        node.domain, node.op_type = "com.microsoft", "PythonOp"
        del node.attribute[:]
        node.attribute.extend(kept)


def refuse_bodies(graph: onnx.GraphProto) -> None:
    """Raise :class:`EngineError` if a PythonOp node stands where onnxruntime-training cannot run it."""
    bound = {node.name for node in graph.node}
    for node in python_op_nodes(graph):
        if node.name not in bound:
            raise EngineError(
                f"PythonOp {function_of(node)} (node '{node.name}') stands in the body of an If, Loop or "
                f"Scan, where onnxruntime-training cannot run it; use a stock onnxruntime (pip install "
                f"'torch2ort[cpu]')"
            )


def rename_functions(model: bytes, names: Mapping[str, str]) -> bytes:
    """``model`` with other names of the Functions that its PythonOp and PythonOpGrad nodes call.

    Args:
        model: ONNX, as onnxruntime-training writes it.
        names: present ``func_name`` -> new one.
    """
    if all(name == present for present, name in names.items()):
        return model
    proto = onnx.load_from_string(model)
    name_functions(proto.graph, names)
    renamed: bytes = proto.SerializeToString()
    return renamed


def name_functions(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """The same for a graph, in place."""
    for node in graph.node:
        if node.op_type not in ("PythonOp", "PythonOpGrad"):
            continue
        for attribute in node.attribute:
            if attribute.name == "func_name":
                attribute.s = names[attribute.s.decode()].encode()


def reraise(error: Exception) -> None:
    """Raise the exception that a Function raised during the failed run, or an EngineError.

    Raises:
        EngineError: ONNX Runtime itself failed.
    """
    kept = native.take_error()
    if kept is not None:
        raise kept
    raise EngineError(f"ONNX Runtime failed: {error}") from error


def _callables(site: Site, function: type[torch.autograd.Function]) -> tuple[Any, Any, Any]:
    """What the native site calls: forward, setup_context (or ``None``) and backward."""
    backward = backward_of(function)
    if site.mapped:
        forward, backward = own_gradient(site, backward)
        return forward, None, backward
    setup_context = None
    if uses_setup_context(function):
        setup_context = under(site.autocast, function.setup_context)
    forward = under(site.autocast, function.forward)
    if site.caught:
        caller = "an operator" if site.internal else f"{site.func_name}.forward"
        forward = told(caller, site.caught, forward)
    if site.fresh:
        forward, setup_context = anew(site, forward, setup_context), None
    if not site.known_result.checked:
        return forward, setup_context, backward
    return *watched(site, forward, setup_context), backward


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def install_runners() -> None:
    """Give onnxruntime-training our runners and the executor of stop-gradients, once a process."""
    ort = private.training_pybind()
    forward, backward = native.training_runners()
    ort.register_forward_runner(forward)
    ort.register_backward_runner(backward)
    is_cpu_argument, execute = native.aten_executor()
    ort.register_aten_op_executor(str(is_cpu_argument), str(execute))
    ort.register_custom_stop_gradient_edges("org.pytorch.aten::ATen::detach::", {0})
    atexit.register(ort.unregister_python_functions)
