"""Conversion of nested data to flat tensors and a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import optree
import torch

from torch2ort.errors import SchemaError
from torch2ort.io_schema._diagnosis import explain
from torch2ort.io_schema._leaves import UnsupportedError, is_leaf
from torch2ort.io_schema._paths import written
from torch2ort.io_schema._schema import Schema
from torch2ort.io_schema._structure import Node, flatten_tree, leaf_node, nodes_of, paths_of

_REMEMBERED: Final = 8
_recent: tuple[Schema, ...] = ()  # replaced as a whole, so that threads need no lock


def flatten(
    data: Any,
    *,
    constants_as_tensors: bool = False,
    device: torch.device | str | None = None,
    root: str = "data",
) -> tuple[list[torch.Tensor], Schema]:
    """Split nested data into its tensors and a schema, depth first.

        >>> import torch
        >>> from torch2ort import io_schema
        >>> tensors, schema = io_schema.flatten({"a": {"b": torch.ones(2)}, "scale": 0.5})
        >>> [leaf.name for leaf in schema.leaves]
        ['a_b']
        >>> tensors, schema = io_schema.flatten({"scale": 0.5, "name": "x"}, constants_as_tensors=True)
        >>> tensors
        [tensor(0.5000)]

    Args:
        data: Tensors, ``None``, ``str``, ``bool``, ``int``, ``float``, and containers of them: tuple, list,
            namedtuple, dict, OrderedDict, defaultdict, deque, dataclass, ``ModelOutput``, mappings and
            sequences that their class rebuilds from their items, and classes registered with optree in its
            global namespace or in ``"torch2ort"``. A key may be any hashable object.
        constants_as_tensors: Turn each bool, int and float into ``torch.tensor(value)``; None and str stay
            constants.
        device: Device of those tensors; torch's default device if None. Other tensors stay on their devices.
        root: Name of the variable `data` in the path of an error.

    Returns:
        The tensors themselves, not copies, and the schema.

    Raises:
        SchemaError: `data` contains something else, or a container cannot be rebuilt, contains itself, or is
            nested too deep. The message contains the path.
    """
    if not constants_as_tensors:
        for schema in _recent:
            tensors = schema.match(data)
            if tensors is not None:
                return tensors, schema
    leaves, nodes, spec = _describe(data, root)
    if constants_as_tensors:
        leaves = _tensors_for(leaves, nodes, device, root)
        nodes = nodes_of(spec, list(map(leaf_node, leaves)))
    schema = Schema(nodes, spec)
    _remember(schema)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], schema


def constants_to_tensors(
    tensors: Sequence[torch.Tensor], schema: Schema, given: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], Schema, frozenset[int]]:
    """Replace some constants by tensors.

    Args:
        tensors: the tensors of the data.
        schema: the schema of the data.
        given: position of the constant among the leaves, as in ``schema.constants`` -> the tensor.

    Returns:
        The tensors and the schema of such data, and the positions of the given ones among the tensors.
    """
    rest = iter(tensors)
    constants = {**schema.constants, **given}
    leaves = [constants[i] if i in constants else next(rest) for i in range(len(constants) + len(tensors))]
    nodes = nodes_of(schema._spec, list(map(leaf_node, leaves)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    positions = frozenset(n for n, i in enumerate(places) if i in given)
    return [leaves[i] for i in places], Schema(nodes, schema._spec), positions


def _remember(schema: Schema) -> None:
    """Make later calls try `schema` first: matching data is cheaper than describing it."""
    global _recent
    _recent = (schema, *_recent[: _REMEMBERED - 1])


def _describe(data: Any, root: str) -> tuple[list[Any], tuple[Node, ...], optree.PyTreeSpec]:
    """Return the tensors and constants of `data`, and its structure as nodes and in optree's terms.

    Raises:
        SchemaError: See :func:`flatten`.
    """
    cause: Exception | None = None
    try:
        leaves, spec = flatten_tree(data)
        if all(map(is_leaf, leaves)):
            return leaves, nodes_of(spec, list(map(leaf_node, leaves))), spec
    except (UnsupportedError, RecursionError) as error:
        cause = error
    raise explain(data, root, cause) from cause


def _tensors_for(
    leaves: list[Any], nodes: Sequence[Node], device: torch.device | str | None, root: str
) -> list[Any]:
    """Return `leaves` with a tensor in place of each number.

    Raises:
        SchemaError: An int has more than 64 bits.
    """
    made = []
    for index, leaf in enumerate(leaves):
        if type(leaf) not in (bool, int, float):
            made.append(leaf)
            continue
        try:
            made.append(torch.tensor(leaf, device=device))
        except (OverflowError, RuntimeError, ValueError) as error:
            path = [path for node, path in zip(nodes, paths_of(nodes), strict=True) if node.is_leaf][index]
            raise SchemaError(
                f"{written(path, root)}: torch.tensor({leaf!r}) failed: {error}. Pass a number that fits "
                "torch's types, or leave constants_as_tensors off."
            ) from error
    return made
