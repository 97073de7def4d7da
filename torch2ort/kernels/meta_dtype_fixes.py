"""Element types of results that PyTorch reports wrongly for tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload, schema_of
from torch2ort._torch.fake_tensors import fake_mode

aten = torch.ops.aten
# Normalizations -> the number of their last results that are new running statistics.
_NORMS: dict[OpOverload, int] = {
    aten._native_batch_norm_legit_functional.default: 2,
    aten._batch_norm_with_update_functional.default: 2,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm.default: 0,
    aten.native_group_norm.default: 0,
    aten.native_layer_norm.default: 0,
}
_GROUPS_BACKWARD = aten.native_group_norm_backward.default
_WEIGHT_NORM = aten._weight_norm_interface.default
_LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
_WRONG_DTYPES = frozenset({*_NORMS, _GROUPS_BACKWARD, _WEIGHT_NORM, _LSTM_BACKWARD})


def eager_dtypes(
    operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], results: Any
) -> Any:
    """Return the results of a call of ``operator`` with the element types of eager PyTorch on CPU.

    A normalization in half precision has statistics in the type of its parameters, or of the running
    statistics or the input if it has none. The gradients of an LSTM's two biases are two tensors.
    """
    if operator not in _WRONG_DTYPES:
        return results
    if operator is _WEIGHT_NORM:
        weight, norms = results
        return weight, norms.float() if weight.dtype is torch.float16 else norms
    if operator is _LSTM_BACKWARD:
        *others, bias, state, cell = results
        return *others, torch.empty_like(bias), state, cell
    names = [a.name for a in schema_of(operator).arguments]
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    if operator is _GROUPS_BACKWARD:
        gradient, *others = results
        return (None if gradient is None else gradient.to(given["input"].dtype), *others)
    of_input = (given.get(name) for name in ("weight", "running_mean", "input"))
    kind = next(tensor for tensor in of_input if tensor is not None).dtype
    output, mean, inverse, *rest = results
    first = len(rest) - _NORMS[operator]
    new = (
        value.to(given[name].dtype)
        for value, name in zip(rest[first:], ("running_mean", "running_var"), strict=False)
    )
    return (output, mean.to(kind), inverse.to(kind), *rest[:first], *new)


def fix_fake_dtypes(graph: torch.fx.Graph) -> None:
    """Set the element types of nodes' fake results to those of eager PyTorch, also in consumers."""
    mode = fake_mode(graph)
    if mode is None:
        return
    changed: set[torch.fx.Node] = set()
    for node in graph.nodes:
        reads_changed = not changed.isdisjoint(node.all_input_nodes)
        if node.op != "call_function" or not (node.target in _WRONG_DTYPES or reads_changed):
            continue
        arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        before = node.meta["val"]
        with mode, torch.no_grad():
            told = node.target(*arguments, **keywords) if reads_changed else before
            values = eager_dtypes(node.target, arguments, keywords, told)
        node.meta["val"] = tuple(values) if isinstance(before, tuple) else values
        if _dtypes(node.meta["val"]) != _dtypes(before):
            changed.add(node)


def _dtypes(values: Any) -> list[torch.dtype]:
    several = values if isinstance(values, (list, tuple)) else (values,)
    return [value.dtype for value in several if isinstance(value, torch.Tensor)]
