"""Storage of a joint graph as JSON, from which another process builds backward halves when it needs them."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.cache.key.key import Unkeyable
from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.symbolic_shapes import sizes_of, written
from torch2ort.program.fx_json import dump_argument, load_argument, operator_named
from torch2ort.pythonop import Site
from torch2ort.pythonop.attributes import UnstorableError, dump_constant, load_constant
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.sizes import expressions
from torch2ort.sizes.symbols import expression_of, size_hint
from torch2ort.sizes.unbacked_sizes import clear_deferred_asserts
from torch2ort.symbolics.registered.user_gradient_ops import (
    MAPPED_CALL,
    MAPPED_CALL_GRAD,
    MappedCall,
    mapped_call,
)

_GETITEM = "getitem"
_MAPPED = (MAPPED_CALL, MAPPED_CALL_GRAD)
# Position of the argument that is the key of a site, which is valid in one process only.
_SITES = {DIFFERENTIABLE_PYTHON_OP: 1, PYTHON_OP_GRAD: 2}


def stored_joint(joint: Joint, feeds: Sequence[int], calls: Mapping[str, Site]) -> bytes:
    """Return a joint graph as JSON.

    Args:
        joint: the joint graph.
        feeds: for each input of the program, the feed's position; -1 for a constant.
        calls: the site of each call of a Function, by its name in the forward half.

    Raises:
        Unkeyable: the graph contains something that cannot be stored.
    """
    names = {site.key: name for name, site in calls.items()}
    traces: dict[str, int] = {}
    nodes = []
    mapped: dict[str, Any] = {}
    try:
        for node in joint.graph_module.graph.nodes:
            if node.op == "output":
                continue
            trace = traces.setdefault(node.meta.get("stack_trace") or "", len(traces))
            nodes.append([node.name, *_call(node, names), _dump_value(node.meta["val"]), trace])
            if node.target is MAPPED_CALL:
                mapped[node.args[-1]] = mapped_call(node.args[-1]).to_json()
    except UnstorableError as error:
        raise Unkeyable(f"the joint graph holds {error}") from error
    sizes = sizes_of(joint.inputs)
    data = {
        "sizes": {symbol: size_hint(size) for symbol, size in sizes.items()},
        "decided": sorted(_symbols(joint) - sizes.keys()),
        "mapped": mapped,
        "nodes": nodes,
        "traces": list(traces),
        "inputs": [[node.name, i] for node, i in joint.inputs.items()],
        "tangents": [[node.name, i] for node, i in joint.tangents.items()],
        "outputs": [node.name for node in joint.outputs],
        "written": [[i, node.name] for i, node in joint.written.items()],
        "gradients": [[i, node.name] for i, node in joint.gradients.items()],
        "shared": sorted(joint.shared),
        "feeds": list(feeds),
    }
    return json.dumps(data).encode()


def loaded_joint(text: bytes, calls: Mapping[str, Site]) -> tuple[Joint, list[int]]:
    """Load a joint graph and the feeds of the program's inputs.

    Args:
        text: the result of :func:`stored_joint`.
        calls: the sites of the same calls in this process.
    """
    data = json.loads(text)
    graph = torch.fx.Graph()
    found: dict[str, torch.fx.Node] = {}
    mode, made = private.symbolic_sizes(list(data["sizes"].values()), unbacked=len(data["decided"]))
    sizes = dict(zip([*data["sizes"], *data["decided"]], made, strict=True))
    mapped: dict[str, MappedCall] = {}
    with mode:
        for name, target, args, kwargs, value, trace in data["nodes"]:
            if target is None:
                node = graph.placeholder(name)
            else:
                function = _target(target)
                given = _load(args, found, sizes)
                if function in _SITES and given[_SITES[function]] in calls:
                    given[_SITES[function]] = calls[given[_SITES[function]]].key
                elif function in _MAPPED:
                    name_of_call = given[-1]
                    if function is MAPPED_CALL:
                        results = _load_value(value, sizes)
                        mapped[name_of_call] = MappedCall.from_json(data["mapped"][name_of_call], results)
                    given[-1] = mapped[name_of_call].key
                node = graph.create_node("call_function", function, name=name)
                # Passed to create_node, sizes among them would make torch warn.
                node.args, node.kwargs = tuple(given), _load(kwargs, found, sizes)
            node.meta = {"val": _load_value(value, sizes), "stack_trace": data["traces"][trace] or None}
            found[name] = node
    graph.output(())
    joint = Joint(
        graph_module=torch.fx.GraphModule(torch.nn.Module(), graph),
        inputs={found[name]: i for name, i in data["inputs"]},
        tangents={found[name]: i for name, i in data["tangents"]},
        outputs=tuple(found[name] for name in data["outputs"]),
        written={i: found[name] for i, name in data["written"]},
        gradients={i: found[name] for i, name in data["gradients"]},
        shared=frozenset(data["shared"]),
        sites=tuple(mapped.values()),
    )
    _note_sizes_of_gradients(joint)
    return joint, data["feeds"]


def _note_sizes_of_gradients(joint: Joint) -> None:
    """Make torch treat a gradient's sizes as those of its output, as in the process that traced."""
    graph = joint.graph_module.graph
    for node, i in joint.tangents.items():
        for size, other in zip(node.meta["val"].shape, joint.outputs[i].meta["val"].shape, strict=True):
            if isinstance(size, torch.SymInt) or isinstance(other, torch.SymInt):
                private.assert_sizes_equal(size, other)
    clear_deferred_asserts(graph)


def _call(node: torch.fx.Node, names: Mapping[str, str]) -> tuple[str | None, Any, Any]:
    """Return operator, arguments and keywords of a node."""
    if node.op == "placeholder":
        return None, [], _dump({})
    args = list(node.args)
    if node.target is operator.getitem:
        return _GETITEM, _dump(args), _dump({})
    if node.op != "call_function" or not isinstance(node.target, private.OpOverload):
        raise UnstorableError(f"{node.target}, which is no operator")
    if node.target in _SITES:
        # No derivative is requested of a call that has no node in the forward half.
        args[_SITES[node.target]] = names.get(str(args[_SITES[node.target]]), "")
    return str(node.target), _dump(args), _dump(dict(node.kwargs))


def _target(text: str) -> Any:
    if text == _GETITEM:
        return operator.getitem
    return operator_named(text)


def _dump(value: Any) -> Any:
    return dump_argument(value, _dump_leaf)


def _dump_leaf(value: Any) -> Any:
    return _dump_size(value) if isinstance(value, torch.SymInt) else dump_constant(value)


def _load(value: Any, nodes: Mapping[str, torch.fx.Node], sizes: Mapping[str, Any]) -> Any:
    def leaf(form: Any) -> Any:
        is_size = isinstance(form, dict) and "varies" in form
        return _load_size(form, sizes) if is_size else load_constant(form)

    return load_argument(value, nodes, leaf)


def _symbols(joint: Joint) -> set[str]:
    """Return the symbols of all sizes in a joint graph: those of inputs, and those that depend on values."""
    found: set[str] = set()

    def note(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            found.update(map(str, expression_of(value).free_symbols))
        elif isinstance(value, torch.Tensor):
            list(map(note, (*value.shape, *value.stride())))
        return value

    for node in joint.graph_module.graph.nodes:
        if node.op != "output":
            torch.fx.node.map_aggregate((node.args, node.kwargs, node.meta["val"]), note)
    return found


def _dump_size(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else {"varies": written(size)}


def _load_size(value: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(value, int):
        return value
    return expressions.evaluate(expressions.parse(value["varies"]), sizes)


def _dump_value(value: Any) -> Any:
    """Return a node's fake value as JSON: tensors by dtype, sizes and strides."""
    if isinstance(value, (list, tuple)):
        return [_dump_value(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return dump_constant(value)
    sizes, strides = map(_dump_size, value.shape), map(_dump_size, value.stride())
    return {"tensor": [dump_constant(value.dtype), list(sizes), list(strides)]}


def _load_value(value: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return tuple(_load_value(item, sizes) for item in value)
    if isinstance(value, dict) and "tensor" in value:
        dtype, *layout = value["tensor"]
        shape, strides = ([_load_size(size, sizes) for size in part] for part in layout)
        return torch.empty_strided(shape, strides, dtype=load_constant(dtype))
    return load_constant(value)
