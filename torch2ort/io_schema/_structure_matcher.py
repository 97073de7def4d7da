"""Checks, each built once for a structure, that return the tensors of data that has the structure.

``optree.tree_flatten`` and a comparison cost too much for a training step: most of the time is spent on a
description of the structure, which is discarded once it is compared. A matcher builds no description, and
stops at the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import optree
import torch

from torch2ort.io_schema._containers import NAMESPACE
from torch2ort.io_schema._leaves import UnsupportedError, exact
from torch2ort.io_schema._structure import Node, flatten_tree, nodes_of, open_one, paths_of

Matcher = Callable[[Any], "list[torch.Tensor] | None"]
"""Returns the tensors of data that has the structure, in order, and None for other data."""

_Guard = Callable[[Any, list[Any], list[Any]], bool]
"""Appends the leaves of its first argument to its second, the keys of dicts to its third; False if the rest
of the structure differs."""

_PLAIN_KEYS: Final = frozenset({str, int, bool, bytes, type(None)})  # the same if type and `==` agree
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_DICTS: Final = ("dict", "ordereddict", "defaultdict")
_DEEPEST_GUARD: Final = 100  # guards call each other, one call per level


def matcher_of(nodes: Sequence[Node]) -> Matcher:
    """Return the matcher of a structure."""
    depths = list(map(len, paths_of(nodes)))
    guard = _guard_of(nodes, depths)
    same_keys = _key_check(
        [node for node, depth in zip(nodes, depths, strict=True) if depth < _DEEPEST_GUARD]
    )
    select = _selector(nodes)

    def match(data: Any) -> list[torch.Tensor] | None:
        leaves: list[Any] = []
        keys: list[Any] = []
        try:
            return select(leaves) if guard(data, leaves, keys) and same_keys(keys) else None
        except UnsupportedError:
            return None

    return match


# --- containers


def _guard_of(nodes: Sequence[Node], depths: Sequence[int]) -> _Guard:
    guards: list[_Guard | None] = []
    ends: list[int] = []
    for start in reversed(range(len(nodes))):
        node = nodes[start]
        children = [guards.pop() for _ in range(node.arity)]
        end = [start + 1, *(ends.pop() for _ in range(node.arity))][-1]
        ends.append(end)
        if node.is_leaf or depths[start] > _DEEPEST_GUARD:
            guards.append(None)
        elif depths[start] == _DEEPEST_GUARD:
            guards.append(_description_guard(nodes[start:end]))
        else:
            guards.append(_container_guard(node, children))
    return guards.pop() or _append


def _append(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
    leaves.append(value)
    return True


def _container_guard(node: Node, children: list[_Guard | None]) -> _Guard:
    if node.kind in ("tuple", "list", "namedtuple", "structsequence"):
        return _sequence_guard(node, children)
    if node.kind == "defaultdict":
        return _defaultdict_guard(node, _dict_guard(node, children))
    if node.kind in _DICTS:
        return _dict_guard(node, children)
    return _general_guard(node, children)


def _check_children(values: Any, children: list[_Guard | None], leaves: list[Any], keys: list[Any]) -> bool:
    for value, child in zip(values, children):  # noqa: B905 - the lengths are equal, and strict takes time
        if child is None:
            leaves.append(value)
        elif not child(value, leaves, keys):
            return False
    return True


def _sequence_guard(node: Node, children: list[_Guard | None]) -> _Guard:
    cls: Any = node.cls
    arity, has_containers = node.arity, any(children)

    def guard(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
        if type(value) is not cls or len(value) != arity:
            return False
        if has_containers:
            return _check_children(value, children, leaves, keys)
        leaves += value
        return True

    return guard


def _dict_guard(node: Node, children: list[_Guard | None]) -> _Guard:
    cls: Any = node.cls
    arity, has_containers = node.arity, any(children)

    def guard(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
        if type(value) is not cls or len(value) != arity:
            return False
        keys += value
        if has_containers:
            return _check_children(value.values(), children, leaves, keys)
        leaves += value.values()
        return True

    return guard


def _defaultdict_guard(node: Node, dict_guard: _Guard) -> _Guard:
    factory = exact(node.detail)

    def guard(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
        return dict_guard(value, leaves, keys) and exact(value.default_factory) == factory

    return guard


def _general_guard(node: Node, children: list[_Guard | None]) -> _Guard:
    """Return the guard of a class that Python code takes apart; that code runs each time."""
    cls: Any = node.cls
    token = node.token

    def guard(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
        if type(value) is not cls:
            return False
        opened = open_one(value)
        return (
            opened is not None
            and opened[0].token == token
            and _check_children(opened[1], children, leaves, keys)
        )

    return guard


def _description_guard(nodes: Sequence[Node]) -> _Guard:
    """Return the guard of a structure so deep that nested guards in it could exceed the recursion limit."""
    tokens = [node.token for node in nodes if not node.is_leaf]
    leaf_nodes = [node for node in nodes if node.is_leaf]

    def guard(value: Any, leaves: list[Any], keys: list[Any]) -> bool:
        try:
            found, spec = flatten_tree(value)
        except RecursionError:
            return False
        leaves += found
        if len(found) != len(leaf_nodes):
            return False
        return [node.token for node in nodes_of(spec, leaf_nodes) if not node.is_leaf] == tokens

    return guard


# --- keys, of all dicts together: one comparison of long lists is faster than many of short ones


def _key_check(nodes: Sequence[Node]) -> Callable[[list[Any]], bool]:
    """Return the function that compares the collected keys with those of `nodes`."""
    expected = [key for node in nodes if node.kind in _DICTS for key in node.keys]
    if not expected:
        return _any_keys
    types = list(map(type, expected))
    if not _PLAIN_KEYS.issuperset(types):
        token = exact(expected)
        return lambda keys: exact(keys) == token

    def same(keys: list[Any]) -> bool:
        # Types are compared first, because `==` of a key of another type can run any code.
        return list(map(type, keys)) == types and keys == expected

    return same


def _any_keys(keys: list[Any]) -> bool:
    return True


# --- leaves


def _selector(nodes: Sequence[Node]) -> Callable[[list[Any]], list[torch.Tensor] | None]:
    """Return the function that checks the collected leaves and picks the tensors among them."""
    leaves = [node for node in nodes if node.is_leaf]
    tensor_at = [index for index, node in enumerate(leaves) if node.kind == "tensor"]
    dtypes = [leaves[index].detail[0] for index in tensor_at]
    ranks = [leaves[index].detail[1] for index in tensor_at]
    same_constants = _constant_check(leaves)

    def select(leaves: list[Any]) -> list[torch.Tensor] | None:
        if same_constants is not None:
            if not same_constants(leaves):
                return None
            leaves = [leaves[index] for index in tensor_at]
        if not _PLAIN_TENSORS.issuperset(map(type, leaves)) and not all(map(_is_tensor_leaf, leaves)):
            return None
        # Two passes are faster than one that looks at both.
        if [leaf.dtype for leaf in leaves] != dtypes or [leaf.ndim for leaf in leaves] != ranks:
            return None
        return leaves

    return select


def _constant_check(leaves: Sequence[Node]) -> Callable[[list[Any]], bool] | None:
    """Return the function that compares the constants among the collected leaves; None if there are none."""
    constant_at = [index for index, node in enumerate(leaves) if node.kind == "constant"]
    # `==` does not find nan equal to nan, and finds 0.0 equal to -0.0: those are compared by their digits.
    constant_at.sort(key=lambda index: _needs_digits(leaves[index].detail))
    expected = [leaves[index].detail for index in constant_at]
    types = list(map(type, expected))
    plain = [value for value in expected if not _needs_digits(value)]
    digits = [value.hex() for value in expected if _needs_digits(value)]
    count = len(plain)

    def same(leaves: list[Any]) -> bool:
        given = [leaves[index] for index in constant_at]
        if list(map(type, given)) != types:
            return False
        return given[:count] == plain and [value.hex() for value in given[count:]] == digits

    return same if constant_at else None


def _needs_digits(constant: Any) -> bool:
    return type(constant) is float and (constant != constant or constant == 0.0)


def _is_tensor_leaf(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    # A subclass of Tensor may be registered as a container.
    tree: Any = value
    return optree.tree_is_leaf(tree, none_is_leaf=True, namespace=NAMESPACE)
