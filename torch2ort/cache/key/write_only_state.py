"""State that forward writes before it reads it: no graph depends on its earlier content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WriteOnlyState:
    """Places whose contents no graph depends on.

    Attributes:
        names: id of a dictionary (an object's attributes, too) -> keys.
        containers: ids of lists and other containers.
        alive: the objects with these ids, kept alive so that no other object gets their ids.
    """

    names: Mapping[int, frozenset[str]] = field(default_factory=dict)
    containers: frozenset[int] = frozenset()
    alive: tuple[Any, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.names or self.containers)

    def __and__(self, other: WriteOnlyState) -> WriteOnlyState:
        names = {i: found & other.names.get(i, frozenset()) for i, found in self.names.items()}
        kept = {i: found for i, found in names.items() if found}
        return WriteOnlyState(kept, self.containers & other.containers, (*self.alive, *other.alive))

    def of(self, owner: dict[Any, Any]) -> frozenset[str]:
        """Return the unread keys of a dictionary."""
        return self.names.get(id(owner), frozenset())


NOTHING = WriteOnlyState()
