"""Effects of a call of forward on Python objects, and their repetition by a run of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch2ort.cache.key.write_only_state import NOTHING, WriteOnlyState
from torch2ort.effects.value_templates import ValueTemplate
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Named


@dataclass
class Write:
    """The effect of a call on one place.

    Attributes:
        place: the place as users write it.
        holder: the place.
    """

    place: str
    holder: Holder[Any]

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """Repeat the write with the values of a run.

        Args:
            tensors: tensors of the run.
            made: containers of the run.
        """
        raise NotImplementedError

    @property
    def owner(self) -> Any:
        """The dictionary or list that is written to."""
        return self.holder.value

    def is_unread(self, unread: WriteOnlyState) -> bool:
        """Return True if all keys and items of the write are in ``unread``."""
        return id(self.owner) in unread.containers

    def make_whole(self) -> bool:
        """Make the write replace all contents of its place, if it determines them; return True if so."""
        return False


@dataclass
class KeysWritten(Write):
    """A write to a dictionary, an object's attributes, or the like.

    Attributes:
        holder: the place.
        sets: the values that are set.
        gone: keys that are removed.
        cleared: True if all other keys are removed.
    """

    holder: Named
    sets: dict[Any, ValueTemplate]
    gone: tuple[Any, ...]
    cleared: bool = False

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        values = {key: template.make(tensors, made) for key, template in self.sets.items()}
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

    def is_unread(self, unread: WriteOnlyState) -> bool:
        """See :meth:`Write.is_unread`."""
        return super().is_unread(unread) or unread.of(self.owner) >= self.sets.keys()

    def make_whole(self) -> bool:
        """See :meth:`Write.make_whole`."""
        self.cleared = self.cleared or self.holder.before.keys() <= {*self.sets, *self.gone}
        return self.cleared


@dataclass
class ItemsWritten(Write):
    """A write to a list or deque.

    Attributes:
        new: the items that are appended.
        whole: True if all other items are removed.
    """

    new: list[ValueTemplate]
    whole: bool

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        values = [template.make(tensors, made) for template in self.new]
        if self.whole:
            self.owner.clear()
        self.owner.extend(values)

    def make_whole(self) -> bool:
        """See :meth:`Write.make_whole`."""
        self.whole = self.whole or not self.holder.before
        return self.whole


@dataclass
class ContentsWritten(Write):
    """A write to a set, which has the same contents after each call."""

    contents: Any

    def do(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> None:
        """See :meth:`Write.do`."""
        self.holder.write(self.contents)


@dataclass(frozen=True)
class Effects:
    """The effects of a graph's runs on Python objects.

    Attributes:
        writes: the writes, in the order in which they were found.
        unread: the places among them that forward does not read before it writes them.
        one_time_writes: changes that are made once, with the graph, which remains valid with them.
        constants: True if other values than tensors are written.
    """

    writes: tuple[Write, ...] = ()
    unread: WriteOnlyState = field(default=NOTHING)
    one_time_writes: tuple[Write, ...] = ()
    constants: bool = False

    def __bool__(self) -> bool:
        return bool(self.writes)

    @property
    def places(self) -> list[str]:
        """The places that are written to, for messages."""
        return [write.place for write in self.writes]

    @property
    def owners(self) -> list[Any]:
        """The dictionaries and lists that are written to."""
        return [write.owner for write in self.writes]

    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Repeat the writes with the tensors of a run."""
        made: dict[int, Any] = {}
        for write in self.writes:
            write.do(tensors, made)

    def with_reads(self, unread: WriteOnlyState, cleared: frozenset[int]) -> Effects:
        """Return these effects with the results of a search for places that forward reads.

        Args:
            unread: places that it does not read before it writes them.
            cleared: ids of the places that it clears first.
        """
        kept: list[Write] = []
        lost: set[int] = set()
        for write in self.writes:
            if id(write.owner) in cleared and not write.make_whole():
                # The contents afterwards are not known in full.
                lost.add(id(write.owner))
            kept.append(write)
        names = {key: found for key, found in unread.names.items() if key not in lost}
        unread = WriteOnlyState(names, unread.containers - lost, unread.alive)
        return replace(self, writes=tuple(kept), unread=unread)

    def of(self, writes: Sequence[Write]) -> Effects:
        """Return the effects of some of the writes."""
        owners = {id(write.owner) for write in writes}
        names = {key: found for key, found in self.unread.names.items() if key in owners}
        unread = WriteOnlyState(names, self.unread.containers & owners, self.unread.alive)
        return replace(self, writes=tuple(writes), unread=unread)

    @property
    def needs_eager_check(self) -> bool:
        """True if a run is necessary to find out that the effects are the same in each call."""
        return self.constants or any(not write.is_unread(self.unread) for write in self.writes)

    def forget(self) -> None:
        """Release the previous contents of the places."""
        for write in (*self.writes, *self.one_time_writes):
            write.holder.before = type(write.holder.before)()

    def apply_one_time_writes(self) -> None:
        """Make the changes that the graph remains valid with."""
        for write in self.one_time_writes:
            write.do((), {})


NO_EFFECTS = Effects()
