"""FX graphs as text, the same in each process, and the calls of Functions in them."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.cache.key.key import Unkeyable
from torch2ort.differentiate.symbolic_shapes import written
from torch2ort.program.internal_ops import must_compute
from torch2ort.pythonop import Site, dump_site, site_by_key
from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD

# Position of the argument that is the key of a site, which is valid in this process alone.
_KEYS: dict[Any, int] = {torch.ops.torch2ort.python_op.default: 1, PYTHON_OP_GRAD: 2}
_OWN = frozenset({*_KEYS, must_compute})


class WrittenGraph:
    """The text of all that a graph's translation reads.

    Args:
        graph: a graph of tensors.

    Attributes:
        sites: the calls of Functions and of operators that are not decomposed, in the graph's order.
        text: JSON.

    Raises:
        Unkeyable: a part of the graph has no text.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.sites: list[Site] = []
        self._names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
        lines = [self._line(node) for node in graph.nodes]
        calls = [[site.func_name, site.keeps_state, dump_site(site)] for site in self.sites]
        self.text = json.dumps([lines, calls])

    def _line(self, node: torch.fx.Node) -> list[Any]:
        args = list(node.args)
        position = _KEYS.get(node.target)
        if position is not None:
            args[position] = self._number(site_by_key(str(args[position])))
        arguments = _argument((args, dict(node.kwargs)), self._names)
        return [node.op, _target(node), arguments, _value(node.meta.get("val"))]

    def _number(self, site: Site) -> int:
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site)


def _target(node: torch.fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    target = node.target
    if isinstance(target, private.OpOverload) and (target.namespace != "torch2ort" or target in _OWN):
        return str(target)
    if getattr(target, "__module__", "") in ("_operator", "math") or target is operator.getitem:
        return str(getattr(target, "__name__", target))
    if target in (torch.sym_max, torch.sym_min):
        return str(target.__name__)
    raise Unkeyable(f"it calls {target}, which exists in this process alone")


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
