"""The schema: the containers, constants and tensors that nested data consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch

from torch2ort.errors import SchemaError
from torch2ort.io_schema import _json
from torch2ort.io_schema._difference import difference, differing_path
from torch2ort.io_schema._paths import tensor_names
from torch2ort.io_schema._structure import Node
from torch2ort.io_schema._structure_matcher import Matcher, matcher_of

_SHOWN_TENSORS = 8


class TensorSpec(NamedTuple):
    """One tensor of a schema.

    Attributes:
        index: Position among the flat tensors, from 0.
        name: Its path joined by ``_``, unique in the schema; ``""`` if the data is the tensor itself.
        dtype: Type of its elements.
        rank: Number of its dimensions.
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    name: str
    dtype: torch.dtype
    rank: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schema:
    """Structure of nested data: its containers, its constants, and type and rank of its tensors.

    It is made by :func:`flatten` or :meth:`from_json`, and contains no tensor. Two schemas are equal if the
    containers (class, keys and their order), the constants (type and value) and each tensor's dtype and rank
    are.

        >>> import torch
        >>> from torch2ort import io_schema
        >>> tensors, schema = io_schema.flatten({"x": torch.ones(2, 3), "past": (torch.zeros(4), True)})
        >>> schema
        Schema(x: float32 of rank 2, past_0: float32 of rank 1)
        >>> schema.leaves[1]
        TensorSpec(index=1, name='past_0', dtype=torch.float32, rank=1)
    """

    _nodes: tuple[Node, ...]
    _spec: optree.PyTreeSpec

    @cached_property
    def leaves(self) -> tuple[TensorSpec, ...]:
        """The tensors, in the order in which :func:`flatten` returns them."""
        tensors = (node for node in self._nodes if node.kind == "tensor")
        named = zip(tensor_names(self._nodes), tensors, strict=True)
        return tuple(TensorSpec(index, name, *node.detail) for index, (name, node) in enumerate(named))

    @property
    def cache_count(self) -> int:
        """Number of caches of transformers in the data."""
        return sum(node.kind == "cache" for node in self._nodes)

    def match(self, data: Any) -> list[torch.Tensor] | None:
        """Return the tensors of `data` if its schema equals this one, and None otherwise.

        This is the check of every step. It is equivalent to :func:`flatten` and a comparison, at a fraction
        of the cost. None does not say why; :meth:`difference` does.

        Args:
            data: Anything, also what :func:`flatten` refuses.

        Returns:
            The tensors of `data`, in order.
        """
        return self._matcher(data)

    def difference(self, other: Schema, *, root: str = "data") -> str | None:
        """Return a sentence on where `other` first differs, or None if it is equal.

            >>> import torch
            >>> from torch2ort import io_schema
            >>> _, expected = io_schema.flatten({"past": (torch.ones(2), torch.ones(2, 3, 4))})
            >>> _, given = io_schema.flatten({"past": (torch.ones(2), torch.ones(2, 3).long())})
            >>> expected.difference(given, root="outputs")
            "outputs['past'][1]: expected a float32 tensor of rank 3, got int64 of rank 2"

        Args:
            other: Schema that was given, where this one was expected.
            root: Name of the data's variable in the path.
        """
        return difference(self._nodes, other._nodes, root)

    def differing_path(self, other: Schema, *, root: str = "data") -> str | None:
        """Return the path at which `other` first differs, or None if it is equal; see :meth:`difference`."""
        return differing_path(self._nodes, other._nodes, root)

    @cached_property
    def constants(self) -> dict[int, Any]:
        """The constants, by their positions among the leaves."""
        leaves = (node for node in self._nodes if node.is_leaf)
        return {i: node.detail for i, node in enumerate(leaves) if node.kind == "constant"}

    @cached_property
    def form(self) -> Hashable:
        """A value that is equal for two schemas that differ only in the values of constants."""
        return tuple((node.kind, node.cls) if node.kind == "constant" else node.token for node in self._nodes)

    def to_json(self) -> str:
        """Return a readable text with a line per container or leaf.

        Raises:
            SchemaError: A key of a dict, a factory of a defaultdict or the metadata of a registered class is
                of a type that has no JSON form.
        """
        return _json.encode(self._nodes)

    @classmethod
    def from_json(cls, text: str, *, classes: Iterable[Any] = ()) -> Schema:
        """Return the schema that :meth:`to_json` wrote.

        Nothing is imported, and the only code that runs is the flatten and unflatten functions of classes
        registered with optree.

        Args:
            text: Text that :meth:`to_json` returned, in this process or another.
            classes: Classes and factories of containers that are not found by name among the modules
                imported so far: local classes, and factories of defaultdicts that are not builtin types.

        Raises:
            SchemaError: The text is something else, of another version, or names a class that is neither
                imported nor among `classes`, or is something else here.
        """
        return cls(*_json.decode(text, classes))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Schema) and hash(self) == hash(other) and self._tokens == other._tokens

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        shown = [
            f"{leaf.name}: {str(leaf.dtype).removeprefix('torch.')} of rank {leaf.rank}"
            for leaf in self.leaves[:_SHOWN_TENSORS]
        ]
        return f"Schema({', '.join(shown)}{', ...' if len(self.leaves) > _SHOWN_TENSORS else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (self._nodes, self._spec)

    def __copy__(self) -> Schema:
        return self

    def __deepcopy__(self, memo: Any) -> Schema:
        return self

    @cached_property
    def _tokens(self) -> tuple[Any, ...]:
        return tuple(node.token for node in self._nodes)

    @cached_property
    def _hash(self) -> int:
        return hash(self._tokens)

    @cached_property
    def _is_tensor(self) -> bool:
        """True if the data is a tensor itself."""
        return len(self._nodes) == 1 and self._nodes[0].kind == "tensor"

    @cached_property
    def _matcher(self) -> Matcher:
        return matcher_of(self._nodes)

    @cached_property
    def _template(self) -> tuple[list[Any], list[int]]:
        """The leaves, with None in place of each tensor, and the positions of the tensors."""
        leaves = [node for node in self._nodes if node.is_leaf]
        values = [node.detail if node.kind == "constant" else None for node in leaves]
        return values, [index for index, node in enumerate(leaves) if node.kind == "tensor"]


def unflatten(tensors: Iterable[Any], schema: Schema) -> Any:
    """Build the nested data again; the inverse of ``flatten``.

        >>> from torch2ort import io_schema
        >>> tensors, schema = io_schema.flatten([torch.ones(2), {"scale": 2.5}])
        >>> io_schema.unflatten(tensors, schema)
        [tensor([1., 1.]), {'scale': 2.5}]

    Args:
        tensors: One for each of ``schema.leaves``, in their order. They are put in place as they are: other
            dtypes, or other objects than tensors, are not refused.
        schema: Schema of the data to build.

    Raises:
        SchemaError: There are more or fewer tensors than the schema has.
    """
    given = list(tensors)
    if schema._is_tensor and len(given) == 1:
        return given[0]
    values, positions = schema._template
    if len(given) != len(positions):
        raise SchemaError(_wrong_count(given, schema))
    leaves = values.copy()
    for position, tensor in zip(positions, given, strict=True):
        leaves[position] = tensor
    return schema._spec.unflatten(leaves)


def _wrong_count(given: Sequence[Any], schema: Schema) -> str:
    names = [repr(leaf.name) for leaf in schema.leaves[:_SHOWN_TENSORS]]
    listed = ", ".join(names) + (", ..." if len(schema.leaves) > _SHOWN_TENSORS else "")
    expected = "1 tensor" if len(names) == 1 else f"{len(schema.leaves)} tensors"
    return (
        f"unflatten: expected {expected} ({listed or 'the schema has none'}), got {len(given)}. Pass one for "
        "each of schema.leaves."
    )
