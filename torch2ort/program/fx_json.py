"""Arguments and operators of a program's nodes as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort.pythonop.attributes import dump_constant, load_constant


def dump_argument(value: Any, dump: Callable[[Any], Any] = dump_constant) -> Any:
    """Return an argument as JSON, with nodes as their names; lists and mappings remain what they are.

    Args:
        value: the argument.
        dump: returns the form of a value that is no node, list or mapping.

    Raises:
        UnstorableError: a value has no such form.
    """
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [dump_argument(item, dump) for item in value]
    if isinstance(value, dict):
        return {"keywords": {name: dump_argument(item, dump) for name, item in value.items()}}
    return dump(value)


def load_argument(
    value: Any, nodes: Mapping[str, torch.fx.Node], load: Callable[[Any], Any] = load_constant
) -> Any:
    """Return the argument of :func:`dump_argument`; tuples are lists.

    Args:
        value: its form.
        nodes: the nodes by their names.
        load: returns the value of a form that ``dump`` returned.
    """
    if isinstance(value, list):
        return [load_argument(item, nodes, load) for item in value]
    if isinstance(value, dict) and "node" in value:
        return nodes[value["node"]]
    if isinstance(value, dict) and "keywords" in value:
        return {name: load_argument(item, nodes, load) for name, item in value["keywords"].items()}
    return load(value)


def operator_named(text: str) -> Any:
    """Return the operator with a name, as ``aten.add.Tensor``."""
    namespace, name, overload = text.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
