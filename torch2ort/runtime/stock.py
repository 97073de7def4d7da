"""PythonOp nodes on any onnxruntime: the custom-op library, and the callees of nodes.

The extension module itself is the library. When a session creates the kernel of a node, the library calls
:func:`resolve` for the node's callee; the node itself contains only names.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import torch

from torch2ort._torch import storage as private
from torch2ort.errors import EngineError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.graph.graph_traversal import graphs_in, python_op_nodes
from torch2ort.pythonop import Site, load_site
from torch2ort.pythonop.native import native, note_savings
from torch2ort.runtime import native_sites
from torch2ort.runtime.custom_op.in_place import InplacePlan, plan_of, share_memory, views_only
from torch2ort.runtime.custom_op.output_allocator import is_sole_holder
from torch2ort.runtime.python_op_chains import join_python_ops

KEY_ATTRIBUTE = "site_key"
_READ_ATTRIBUTES = frozenset({"output_tensor_types", "output_tensor_ranks", "gradients", "handed_on"})
_KEPT_ERROR = re.compile(r"\[torch2ort error (\d+)\]")

# Not empty once try_cuda() was called.
_tried: list[bool] = []
# Callees of this process's sessions by a random key, which no file can contain.
_bound: weakref.WeakValueDictionary[str, native_sites.Callee] = weakref.WeakValueDictionary()


def custom_ops_library_path() -> str:
    """Return the path of the library that lets any onnxruntime run exported files.

    Register it in the options of each session whose model contains PythonOp nodes, and register the classes
    that they call with :func:`torch2ort.register_function`::

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(torch2ort.custom_ops_library_path())
        session = onnxruntime.InferenceSession("model.onnx", options)

    The library works in this process only, as it calls Python.
    """
    return native.__file__


def resolve(func_name: str, key: str, text: str) -> native_sites.Callee:
    """Return the callee of a node; called when a session creates the node's kernel.

    Args:
        func_name: the node's attribute of that name.
        key: the key of a node that :func:`bind_nodes` prepared, else ``""``.
        text: the node's site as stored in a file, else ``""``.

    Raises:
        FunctionNotFoundError: no class was registered under the name.
        ModelLoadError: the node's site is damaged, or does not fit the class.
        EngineError: the key belongs to no session of this process.
    """
    if key:
        callee = _bound.get(key)
        if callee is None:
            raise EngineError(
                f"the {KEY_ATTRIBUTE} {key!r} is of no session of this process; use the saved model instead"
            )
        return callee
    described = load_site(func_name, text)
    bind_classes([described])
    found = _native_site(described, views_only(described))
    note_savings(found, ())
    return found


def _native_site(
    site: Site, plan: InplacePlan, key: str = "", originals: native_sites.OriginalFeeds | None = None
) -> native.Site:
    key = f"{site.key}/{key}"
    given = (originals or {}).get(site.key)
    return native_sites.native_site(site, key, training=False, plan=plan, originals=given)


def bind_nodes(
    graph: onnx.GraphProto,
    sites: Mapping[str, Site],
    originals: native_sites.OriginalFeeds | None = None,
    *,
    in_place: bool,
) -> list[native_sites.Callee]:
    """Bind the graph's PythonOp nodes to callees of the custom operator, in place.

    Args:
        graph: a session's copy of an exported graph.
        sites: the site of each PythonOp node, by node name.
        originals: see :func:`torch2ort.runtime.native_sites.original_feeds`.
        in_place: whether in-place maps are supported there; see
            :func:`torch2ort.runtime.custom_op.in_place.follows_maps`.

    Returns:
        The callees of the nodes, which the caller must keep alive.
    """
    saved = share_memory(graph, sites) if in_place else {}
    joined = {name: site for name, site in sites.items() if not native_sites.runs_directly(site)}
    chains = {chain.name: chain for chain in join_python_ops(graph, joined)}
    names: dict[str, str] = {}
    callees: dict[str, native_sites.Callee] = {}
    for node in python_op_nodes(graph):
        key = secrets.token_hex(16)
        chain = chains.get(node.name)
        called = {name: sites[name] for name in (chain.members if chain else (node.name,))}
        members = tuple(
            _native_site(site, plan_of(site, in_place=in_place), key, originals) for site in called.values()
        )
        for name, member in zip(called, members, strict=True):
            note_savings(member, saved.get(name, ()))
        if chain:
            callees[node.name] = native.Chain(key=key, sites=members, links=chain.links)
        else:
            callees[node.name] = native_sites.directly(called[node.name], members[0])
        names[node.name] = ", ".join(site.func_name for site in called.values())
    return bind_callees(graph, callees, names)


def bind_callees(
    graph: onnx.GraphProto, callees: Mapping[str, native_sites.Callee], names: Mapping[str, str]
) -> list[native_sites.Callee]:
    """Bind nodes to callees of the custom operators, in place.

    Args:
        graph: a session's copy of a graph.
        callees: the callee of each PythonOp or PythonOpGrad node, by node name.
        names: names of the Functions for messages, by node name.

    Returns:
        The callees of the nodes, which the caller must keep alive.
    """
    derivatives = [node for node in graph.node if node.op_type == "PythonOpGrad"]
    for node in (*python_op_nodes(graph), *derivatives):
        key = secrets.token_hex(16)
        _bound[key] = callees[node.name]
        kept = [a for a in node.attribute if a.name in _READ_ATTRIBUTES]
        del node.attribute[:]
        texts = {"func_name": names[node.name], KEY_ATTRIBUTE: key}
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(*text) for text in texts.items())])
        node.domain = "com.microsoft"
        if node.op_type != "PythonOpGrad":
            node.op_type = "PythonOp"
        # The context is unused, so no value needs to be written.
        node.output[0] = ""
    return list(callees.values())


def callee_keys(graph: onnx.GraphProto) -> list[str]:
    """Return the keys that :func:`bind_callees` set, in the order of the nodes."""
    return [attribute.s.decode() for attribute in _key_attributes(graph)]


def rename_callees(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Replace these keys by other texts, in place."""
    for attribute in _key_attributes(graph):
        attribute.s = names[attribute.s.decode()].encode()


def _key_attributes(graph: onnx.GraphProto) -> list[onnx.AttributeProto]:
    nodes = (node for part in graphs_in(graph) for node in part.node if node.domain == "com.microsoft")
    return [attribute for node in nodes for attribute in node.attribute if attribute.name == KEY_ATTRIBUTE]


def register_library(session_options: Any) -> None:
    """Let sessions with these options run PythonOp nodes; repeated calls have no effect."""
    session_options.register_custom_ops_library(custom_ops_library_path())


def try_cuda() -> None:
    """Let Functions run on the CUDAExecutionProvider, and modules train on CUDA tensors, from now on.

    Functions run on onnxruntime's stream, and the host does not wait for the device. CUDA is refused before
    this call, because torch2ort's tests have run on an emulated device only: compare the results with eager
    PyTorch's.
    """
    native.try_cuda()
    _tried.append(True)


def cuda_is_tried() -> bool:
    """Return True if :func:`try_cuda` was called."""
    return bool(_tried)


def take_error(error: Exception) -> BaseException | None:
    """Return the exception of a Function that caused onnxruntime's ``error``, if one did."""
    numbers = _KEPT_ERROR.findall(str(error))
    return native.take_custom_op_error(int(numbers[-1])) if numbers else None


@functools.cache
def _external_stream(address: int, device: int) -> torch.cuda.Stream:
    place = torch.device("cuda", device)
    # For address 0, CUDA's name of the default stream, ExternalStream would create one from torch's pool.
    return torch.cuda.ExternalStream(address, device=place) if address else torch.cuda.default_stream(place)


@contextlib.contextmanager
def _on_stream(address: int, device: int) -> Iterator[None]:
    """Make onnxruntime's stream torch's current one: both queue work on it, and the host does not wait."""
    with torch.cuda.stream(_external_stream(address, device)):
        if torch.cuda.is_current_stream_capturing():
            raise EngineError(
                "onnxruntime captures this run as a CUDA graph, whose replays would not call the Functions "
                "in it; make the session without the provider option enable_cuda_graph"
            )
        yield


native.configure_custom_op(
    resolve=resolve,
    is_grad_enabled=torch.is_grad_enabled,
    set_grad_enabled=private.set_grad_enabled,
    stream=_on_stream,
    is_sole_holder=is_sole_holder,
)
