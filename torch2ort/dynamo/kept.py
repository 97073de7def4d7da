"""Graphs of torch.compile in the export cache: the FX graph is the key, and what is kept is its ONNX."""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch

from torch2ort.cache.key.key import Key, Unkeyable, surroundings
from torch2ort.cache.store.shelf import Kept, Shelf
from torch2ort.cache.store.store import DEFAULT_LIMIT, RefusedError, Store
from torch2ort.dynamo import _torch_private as private
from torch2ort.engines.joint.lowered import Lowered
from torch2ort.engines.joint.sizes import written
from torch2ort.errors import ModelLoadError, Torch2OrtWarning
from torch2ort.graph.nodes import load_sites
from torch2ort.kernels.resolve import bind_classes
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.runtime.optimized import identity
from torch2ort.sizes.guessed import conditions
from torch2ort.symbolics.registered import user_operators

_FILE = "graph.onnx"


def kept_or_lowered(
    graph: torch.fx.Graph, opset: int, options: Options, lower: Callable[[], Lowered]
) -> tuple[Lowered, bool]:
    """A graph as ONNX, out of the export cache, or lowered and put there.

    Args:
        graph: of tensors.
        opset: of the ONNX.
        options: where the cache is.
        lower: makes the ONNX.

    Returns:
        The ONNX, and whether it came out of the cache.
    """
    if options.cache_dir is None or options.save_onnx_dir is not None:
        return lower(), False
    made: list[Lowered] = []

    def make() -> Kept:
        known = conditions(graph)
        made.append(lower())
        if conditions(graph) != known:
            raise Unkeyable("its translation holds for some only of the sizes that vary")
        return _packed(made[0])

    try:
        shelf = _shelf(graph, opset, options)
        kept = shelf.obtain("graph of torch.compile", {}, make)
        return (made[0], False) if made else (_unpacked(kept), True)
    except RefusedError as error:
        warnings.warn(str(error), Torch2OrtWarning, stacklevel=2)
    except Unkeyable as reason:
        logger.info("the graph of torch.compile is not cached: %s", reason)
    except ModelLoadError as error:
        logger.info("the graph of torch.compile in the cache does not fit this process: %s", error)
    return (made[0] if made else lower()), False


def _shelf(graph: torch.fx.Graph, opset: int, options: Options) -> Shelf:
    assert options.cache_dir is not None
    _refuse_registered(graph)
    components = {
        **{name: str(value) for name, value in surroundings().items()},
        **identity(options),
        "opset": str(opset),
        "sizes": json.dumps(private.known_of_sizes(graph)),
        "graph": _text(graph),
    }
    store = Store(options.cache_dir, options.cache_limit or DEFAULT_LIMIT)
    return Shelf(store, Key.of("torch.compile", components))


def _refuse_registered(graph: torch.fx.Graph) -> None:
    """Refuse what functions of this process translate; those of ATen's may come in by a decomposition.

    Raises:
        Unkeyable: there are such operators.
    """
    called = {node.target for node in graph.nodes}
    for registered in user_operators():
        if registered in called or registered.namespace == "aten":
            raise Unkeyable(f"{registered} is translated by a function of this process (register_symbolic)")


def _packed(lowered: Lowered) -> Kept:
    if lowered.derivatives or any(not site.internal for site in lowered.calls.values()):
        raise Unkeyable("it calls Functions, or operators that are differentiated as a whole")
    return Kept({}, {_FILE: lowered.proto.SerializeToString()})


def _unpacked(kept: Kept) -> Lowered:
    proto = onnx.load_from_string(kept.files[_FILE])
    calls = load_sites(proto.graph)
    bind_classes(calls.values())
    return Lowered(proto, calls, {})


def _text(graph: torch.fx.Graph) -> str:
    """All of a graph that its translation reads; the same in each process.

    Raises:
        Unkeyable: something in it has no such form.
    """
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = _argument((node.args, dict(node.kwargs)), names)
        lines.append([node.op, _target(node), arguments, _value(node.meta.get("val"))])
    return json.dumps(lines)


def _target(node: torch.fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    target = node.target
    if isinstance(target, private.OpOverload) and target.namespace != "torch2ort":
        return str(target)
    if getattr(target, "__module__", "") in ("_operator", "math") or target is operator.getitem:
        return str(getattr(target, "__name__", target))
    if target in (torch.sym_max, torch.sym_min):
        return str(target.__name__)
    raise Unkeyable(f"it calls {target}, which this process alone knows")


def _argument(value: Any, names: Mapping[torch.fx.Node, str]) -> Any:
    if isinstance(value, torch.fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return [_argument(item, names) for item in value]
    if isinstance(value, dict):
        return {key: _argument(item, names) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    raise Unkeyable(f"it has an argument of type {type(value).__name__}")


def _value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, torch.Tensor):
        strides = map(written, value.stride())
        return [str(value.dtype), str(value.device), [*map(written, value.shape)], [*strides]]
    return str(value)
