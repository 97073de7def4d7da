"""What a call of forward left in Python objects, and how the same is left by a run of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch2ort.cache.key.write_only_state import NOTHING, Unread
from torch2ort.effects.value_templates import Recipe
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Named


@dataclass
class Write:
    """What a call leaves in one place.

    Attributes:
        place: as people write it.
        holder: the place.
    """

    place: str
    holder: Holder[Any]

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """Leave what a run gave.

        Args:
            tensors: of the run.
            made: containers of the run.
        """
        raise NotImplementedError

    @property
    def owner(self) -> Any:
        """The dictionary or list that is written to."""
        return self.holder.value

    def is_unread(self, unread: Unread) -> bool:
        """Whether all of it is among ``unread``."""
        return id(self.owner) in unread.containers

    def clears(self) -> bool:
        """Have all else be thrown away; says whether all that is left is known."""
        return False


@dataclass
class KeysWritten(Write):
    """Of a dictionary, an object's attributes, or the like.

    Attributes:
        holder: the place.
        sets: what is put there.
        gone: keys that are taken away.
        cleared: whether everything else is taken away.
    """

    holder: Named
    sets: dict[Any, Recipe]
    gone: tuple[Any, ...]
    cleared: bool = False

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        values = {key: recipe.make(tensors, made) for key, recipe in self.sets.items()}
        owner = self.owner
        if not isinstance(owner, dict):
            contents = {**self.holder.read(), **values}
            self.holder.write({k: v for k, v in contents.items() if k not in self.gone})
            return
        if self.cleared:
            owner.clear()
        for key in self.gone:
            owner.pop(key, None)
        owner.update(values)

    @property
    def owner(self) -> Any:
        """See :meth:`Write.owner`."""
        return self.holder.entries

    def is_unread(self, unread: Unread) -> bool:
        """See :meth:`Write.is_unread`."""
        return super().is_unread(unread) or unread.of(self.owner) >= self.sets.keys()

    def clears(self) -> bool:
        """See :meth:`Write.clears`."""
        self.cleared = self.cleared or self.holder.before.keys() <= {*self.sets, *self.gone}
        return self.cleared


@dataclass
class ItemsWritten(Write):
    """Of a list or deque.

    Attributes:
        new: what is put at its end.
        whole: whether it holds nothing else.
    """

    new: list[Recipe]
    whole: bool

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        values = [recipe.make(tensors, made) for recipe in self.new]
        if self.whole:
            self.owner.clear()
        self.owner.extend(values)

    def clears(self) -> bool:
        """See :meth:`Write.clears`."""
        self.whole = self.whole or not self.holder.before
        return self.whole


@dataclass
class ContentsWritten(Write):
    """Of a set, which holds the same after each call."""

    contents: Any

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        self.holder.write(self.contents)


@dataclass(frozen=True)
class Effects:
    """What a graph's runs leave in Python objects.

    Attributes:
        writes: in the order in which they were found.
        unread: the places among them that forward does not read from before.
        taken: changes that are left as they are once the graph is made: the graph holds with them, too.
        constants: whether something else than tensors is left.
    """

    writes: tuple[Write, ...] = ()
    unread: Unread = field(default=NOTHING)
    taken: tuple[Write, ...] = ()
    constants: bool = False

    def __bool__(self) -> bool:
        return bool(self.writes)

    @property
    def places(self) -> list[str]:
        """What is written to, for people."""
        return [write.place for write in self.writes]

    @property
    def owners(self) -> list[Any]:
        """The dictionaries and lists that are written to."""
        return [write.owner for write in self.writes]

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave what a run gave."""
        made: dict[int, Any] = {}
        for write in self.writes:
            write.do(tensors, made)

    def with_reads(self, unread: Unread, cleared: frozenset[int]) -> Effects:
        """The same, of which is known what forward reads.

        Args:
            unread: places that it does not read from before.
            cleared: ids of those that it clears first.
        """
        kept: list[Write] = []
        lost: set[int] = set()
        for write in self.writes:
            if id(write.owner) in cleared and not write.clears():
                # What it holds afterwards is not known in full.
                lost.add(id(write.owner))
            kept.append(write)
        names = {key: found for key, found in unread.names.items() if key not in lost}
        unread = Unread(names, unread.containers - lost, unread.alive)
        return replace(self, writes=tuple(kept), unread=unread)

    def of(self, writes: Sequence[Write]) -> Effects:
        """Some of the writes."""
        owners = {id(write.owner) for write in writes}
        names = {key: found for key, found in self.unread.names.items() if key in owners}
        unread = Unread(names, self.unread.containers & owners, self.unread.alive)
        return replace(self, writes=tuple(writes), unread=unread)

    @property
    def need_a_trial(self) -> bool:
        """Whether only a run tells that a call leaves nothing else each time."""
        return self.constants or any(not write.is_unread(self.unread) for write in self.writes)

    def forget(self) -> None:
        """Let go of what was there before."""
        for write in (*self.writes, *self.taken):
            write.holder.before = type(write.holder.before)()

    def take(self) -> None:
        """Make the changes that the graph holds with."""
        for write in self.taken:
            write.do((), {})


NO_EFFECTS = Effects()
