"""The structure of nested data: optree's PyTreeSpec, and the same as a list of comparable nodes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

import optree
import torch
from optree import PyTreeKind

from torch2ort.io_schema._containers import ADAPTERS, NAMESPACE, Adapted, adapt
from torch2ort.io_schema._leaves import exact, is_leaf

MAPPING_KINDS: Final = ("dict", "ordereddict", "defaultdict", "frozendict", "mapping", "model_output")
"""Kinds of containers that have keys, apart from the dataclass, whose keys are the names of its fields."""

LEAF_SPEC: Final = optree.treespec_leaf(none_is_leaf=True, namespace=NAMESPACE)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One container or leaf. A structure is the tuple of its nodes, each in front of its children.

    Attributes:
        kind: ``"tensor"``, ``"constant"``, optree's name for the kind of the container, or the adapter's.
        cls: Class of the container; of a constant; ``torch.Tensor`` for a tensor.
        arity: Number of children.
        keys: Keys of a mapping, names of the fields of a dataclass; empty for other containers.
        detail: Everything else that distinguishes two nodes of one kind: the factory of a defaultdict, the
            length limit of a deque, the metadata of a registered class; ``(dtype, rank)`` of a tensor; the
            value of a constant; otherwise None.
        entries: optree's path entries, one per child, where they are known.
        token: Value that is equal for two nodes only if all of the above but `entries` is the same.

    Raises:
        UnsupportedError: `detail` cannot be compared.
    """

    kind: str
    cls: type
    arity: int = 0
    keys: tuple[Any, ...] = ()
    detail: Any = None
    entries: tuple[optree.PyTreeEntry, ...] = ()
    token: Hashable = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        token = (self.kind, self.cls, self.arity, exact(self.keys), exact(self.detail))
        object.__setattr__(self, "token", token)

    @property
    def is_leaf(self) -> bool:
        """True if this is a tensor or a constant."""
        return self.kind in ("tensor", "constant")


def tensor_node(dtype: torch.dtype, rank: int) -> Node:
    """Return the node of a tensor leaf."""
    return Node("tensor", torch.Tensor, detail=(dtype, rank))


def leaf_node(value: Any) -> Node:
    """Return the node of a tensor or a constant."""
    if isinstance(value, torch.Tensor):
        return tensor_node(value.dtype, value.dim())
    return Node("constant", type(value), detail=value)


def flatten_tree(data: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten data as ``optree.tree_flatten`` does, and also the containers of `adapt`.

    Returns:
        The leaves, including unsupported ones, and the structure in optree's terms.

    Raises:
        UnsupportedError: A container cannot be rebuilt.
        RecursionError: There is a cycle, or the nesting is too deep.
    """
    leaves, spec = optree.tree_flatten(data, none_is_leaf=True, namespace=NAMESPACE)
    if all(map(is_leaf, leaves)):
        return leaves, spec
    opened: list[Any] = []
    specs = []
    for leaf in leaves:
        adapted = None if is_leaf(leaf) else adapt(leaf)
        inner_leaves, inner_spec = ([leaf], LEAF_SPEC) if adapted is None else flatten_tree(adapted)
        opened += inner_leaves
        specs.append(inner_spec)
    in_order = iter(specs)
    return opened, spec.transform(None, lambda _: next(in_order))


def open_one(value: Any) -> tuple[Node, list[Any]] | None:
    """Return a container's node and its children, or None if `value` is not a container.

    Raises:
        UnsupportedError: The container cannot be rebuilt, or two of its kind cannot be compared.
    """
    children, spec = _one_level(value)
    if spec.is_leaf():
        adapted = None if is_leaf(value) else adapt(value)
        if adapted is None:
            return None
        children, spec = _one_level(adapted)
    return _container_node(spec), children


def _one_level(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    root_only = iter((False,))
    return optree.tree_flatten(
        value, is_leaf=lambda _: next(root_only, True), none_is_leaf=True, namespace=NAMESPACE
    )


def nodes_of(spec: optree.PyTreeSpec, leaves: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes of a structure.

    Args:
        spec: The structure.
        leaves: Nodes of its leaves, in order.

    Raises:
        UnsupportedError: The metadata of a registered class cannot be compared.
    """
    nodes = []
    in_order = iter(leaves)
    pending = [spec]
    while pending:
        current = pending.pop()
        level = current.one_level()
        if level is None or current.is_leaf():
            nodes.append(next(in_order))
        else:
            nodes.append(_container_node(level))
            pending.extend(reversed(current.children()))
    return tuple(nodes)


def _container_node(level: optree.PyTreeSpec) -> Node:
    """Return the node of a one-level spec."""
    # Each path of a one-level spec has a single entry.
    entries = tuple(accessor[0] for accessor in level.accessors())
    cls: Any
    data: Any
    cls, data = level.walk([None] * level.num_children, lambda cls, data, _: (cls, data))
    kind, detail = level.kind.name.lower(), None
    keys: tuple[Any, ...] = ()
    if cls is Adapted:
        kind, cls, keys, detail = data
        entries = tuple(ADAPTERS[kind].entry(key, cls, PyTreeKind.CUSTOM) for key in keys)
        keys = () if kind == "sequence" else keys
    elif kind == "defaultdict":
        detail, keys = data[0], tuple(data[1])
    elif kind in MAPPING_KINDS:
        keys = tuple(data)
    elif kind in ("deque", "custom"):
        detail = data
    return Node(kind, cls, len(entries), keys, detail, entries)


def paths_of(nodes: Sequence[Node]) -> Iterator[tuple[optree.PyTreeEntry, ...]]:
    """Yield the path to each node, in the order of `nodes`."""
    pending: list[tuple[optree.PyTreeEntry, ...]] = [()]
    for node in nodes:
        path = pending.pop()
        yield path
        pending.extend((*path, entry) for entry in reversed(node.entries))


def spec_of(nodes: Sequence[Node]) -> optree.PyTreeSpec:
    """Return the optree structure of nodes; the inverse of :func:`nodes_of`.

    Raises:
        ValueError: The nodes are not a tree; also IndexError.
        Exception: Any exception that the unflatten function of a registered class raises.
    """
    done: list[optree.PyTreeSpec] = []
    for node in reversed(nodes):
        if node.is_leaf:
            done.append(LEAF_SPEC)
        else:
            container = _container_of(node, [done.pop() for _ in range(node.arity)])
            done.append(optree.treespec_from_collection(container, none_is_leaf=True, namespace=NAMESPACE))
    (spec,) = done
    return spec


def _container_of(node: Node, children: list[Any]) -> Any:
    """Return a container of `children` that optree describes by `node`."""
    cls: Any = node.cls
    if node.kind in ADAPTERS:
        keys = tuple(range(node.arity)) if node.kind == "sequence" else node.keys
        return Adapted(node.kind, cls, keys, node.detail, tuple(children))
    if node.kind == "custom":
        registered: Any = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
        return registered.unflatten_func(node.detail, children)
    if node.kind == "namedtuple":
        return tuple.__new__(cls, children)  # its own __new__ may ask for tensors
    if node.kind == "defaultdict":
        return defaultdict(node.detail, zip(node.keys, children, strict=True))
    if node.kind == "deque":
        return deque(children, node.detail)
    if node.kind in MAPPING_KINDS:
        return cls(zip(node.keys, children, strict=True))
    return cls(children)
