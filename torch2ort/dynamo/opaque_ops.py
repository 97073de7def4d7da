"""Operators that AOTAutograd must not decompose: each call is one node with PyTorch's own derivative."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.differentiate.opaque_ops import STAY_WHOLE
from torch2ort.kernels.functions import AtenKernel, encode_call
from torch2ort.pythonop import TENSOR, Site
from torch2ort.pythonop.autocast import Autocast
from torch2ort.pythonop.interception import internal_site
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP

# dynamo calls operators by the names of functions and methods; these differ from the operator's name.
_ALIASES = {"matrix_power": "linalg_matrix_power"}
_NAMES = frozenset({o._schema.name.removeprefix("aten::") for o in STAY_WHOLE} | _ALIASES.keys())


def keep_operators_whole(graph_module: torch.fx.GraphModule, sites: list[Site]) -> None:
    """Make the operators opaque that AOTAutograd would decompose differently from eager PyTorch.

    Args:
        graph_module: the graph; it and the graphs that its operators take are changed in place.
        sites: receives the calls as they are traced; a site lives only as long as it is referenced.
    """
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            name = _operator(node)
            if name is None:
                continue
            with module.graph.inserting_before(node):
                call = functools.partial(_whole, name, _original(node), sites)
                # fx generates code that calls the function by its name.
                call.__name__ = call.__qualname__ = name  # type: ignore[attr-defined]
                call.__module__ = __name__
                made = module.graph.call_function(call, node.args, node.kwargs)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
        module.recompile()


def _operator(node: torch.fx.Node) -> str | None:
    """Return the name of the operator that a node calls, if an operator of that name is kept whole."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_method", "call_function") or getattr(builtins, str(name), None) is node.target:
        return None
    return str(name) if name in _NAMES else None


def _original(node: torch.fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        method: Callable[..., Any] = getattr(torch.Tensor, str(node.target))
        return method
    assert callable(node.target)
    return node.target


def _whole(name: str, original: Callable[..., Any], sites: list[Site], *args: Any, **kwargs: Any) -> Any:
    """Call an operator through its kernel, or the original function where the overload is not kept whole."""
    operator = private.overload_of(_ALIASES.get(name, name), args, kwargs)
    if operator not in STAY_WHOLE:
        return original(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    text = encode_call(
        operator,
        [_written(value, tensors) for value in args],
        {key: _written(value, tensors) for key, value in kwargs.items()},
        random=False,
    )
    needed = [_is_tracked(tensor) for tensor in tensors]
    marks = [TENSOR] * len(tensors)
    site = internal_site(
        AtenKernel,
        [text, *marks],
        [False, *needed],
        training=any(needed),
        autocast=Autocast.of_call(),
    )
    sites.append(site)
    outputs = DIFFERENTIABLE_PYTHON_OP(tensors, site.key)[:-1]
    return outputs[0] if len(operator._schema.returns) == 1 else tuple(outputs)


def _is_tracked(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _written(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Encode an argument for the text of a call; its tensors are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        return [_written(item, tensors) for item in value]
    if isinstance(value, torch.SymInt):
        return int(value)
    return value


def return_unused_values(graph_module: torch.fx.GraphModule) -> int:
    """Let a graph of dynamo return its unused values, which AOTAutograd would drop.

    Eager PyTorch computes them, which draws random numbers, or raises an error for some values.

    Args:
        graph_module: the graph; changed in place.

    Returns:
        The number of results that are appended.
    """
    graph = graph_module.graph
    result = graph.output_node()
    more = []
    for node in list(graph.nodes):
        value = node.meta.get("example_value", node.meta.get("val"))
        if (
            node.op not in ("call_function", "call_method")
            or node.users
            or not isinstance(value, torch.Tensor)
        ):
            continue
        if str(getattr(node.target, "__name__", node.target)).endswith("_"):
            continue  # AOTAutograd never drops a write
        with graph.inserting_before(result):
            own = graph.call_method("clone", (graph.call_method("detach", (node,)),))
        own.meta = {"example_value": value}
        more.append(own)
    if more:
        result.args = ((*_sequence(result.args[0]), *more),)
        graph_module.recompile()
    return len(more)


def _sequence(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else (results,)
