"""The states of an ORTModule's model for which graphs are valid, and the guards that compare them.

A graph is made from one state of all that the model's code reads. The walk of the cache's key finds that
state and creates guards, which are compared before each call. Where a guard fails, the state is walked
again, and the graphs of an equal state stay in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch2ort import io_schema
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.guards import ActiveGuards, Change, FunctionWrittenPlaces
from torch2ort.cache.key.key import Dependencies, Unkeyable, dependencies, named_tensors
from torch2ort.cache.key.write_only_state import NOTHING, WriteOnlyState
from torch2ort.errors import ExportError
from torch2ort.sizes.memory_layout import memory_form
from torch2ort.variants.shape_variants import Family


@dataclass(eq=False)
class GuardedState:
    """One state, and the graphs made from it.

    Attributes:
        found: the result of the state's first walk, until a graph was made from it.
        written: the places that Functions write to while they run, and read when they run again.
        unread: the places that its graphs write to and do not depend on; they are no part of the state.
        family: the graphs.
        states: the results of the walks that found this state; the graphs were made from the first.
        guards: the guards on all of that state.
    """

    found: Dependencies | None
    written: FunctionWrittenPlaces
    unread: WriteOnlyState = NOTHING
    family: Family = field(default_factory=Family)
    states: list[Dependencies] = field(init=False)
    guards: ActiveGuards = field(init=False)

    def __post_init__(self) -> None:
        assert self.found is not None
        self.states = [replace(self.found, walk=None)]
        self.guards = self.found.arm_guards(self.written)

    def matches(self, found: Dependencies) -> bool:
        """Return True if ``found`` is an equal state."""
        return any(not found.changes(state, self.written) for state in self.states)

    def while_functions_run(self) -> contextlib.AbstractContextManager[None]:
        """Context that records the writes of Functions to their own state."""
        return _FunctionsRun(self.guards) if self.guards.of_functions else _NOTHING_TO_NOTE


_NOTHING_TO_NOTE = contextlib.nullcontext()


class _FunctionsRun:
    """A context in which Functions run; it is cheap, as each step enters two."""

    __slots__ = ("_before", "_exports", "_guards")

    def __init__(self, guards: ActiveGuards) -> None:
        self._guards = guards

    def __enter__(self) -> None:
        self._exports = exclusive.idle
        self._before = self._guards.changed_of_functions()

    def __exit__(self, *_: object) -> None:
        # During an export in another thread, a change of a shared object is no write of a Function.
        if self._exports is not None and self._exports == exclusive.idle:
            changed = self._guards.changed_of_functions()
            if changed:
                self._guards.note_written(changed, self._before)


class GuardedStates:
    """The states of a model that graphs were made from.

    Args:
        model: the model. Its own hooks are no part of its graphs.
        trust: True to assume that state that no guard can watch does not change.
        inlines_functions: True if the code of every Function is a part of the graphs.
    """

    def __init__(
        self, model: torch.nn.Module, *, trust: bool = False, inlines_functions: bool = False
    ) -> None:
        self._model = model
        self._inlines_functions = inlines_functions
        self._trust = trust
        # True if code may read the strides or the offset of a value, beyond its form.
        self._reads_strides = self._reads_offsets = False
        # True if code may read the exact type of a value, or check which tensors are parameters.
        self.asks_types = self._asks_parameters = False
        self._known: dict[Hashable, list[GuardedState]] = {}
        self._written = FunctionWrittenPlaces()
        self._tensors: tuple[ActiveGuards, int, tuple[str, ...], list[torch.Tensor]] | None = None
        # The guard that failed when a state was found for the first time.
        self.change: Change | None = None

    @property
    def reads_memory(self) -> bool:
        """True if code may read more of a tensor's memory layout than its form."""
        return self._reads_strides or self._reads_offsets

    def now(
        self, key: Hashable, tensors: Sequence[torch.Tensor], schema: io_schema.Schema
    ) -> tuple[GuardedState, int]:
        """Return the present state of the model.

        Args:
            key: all else that a graph depends on: only states under the same key are compared.
            tensors: the call's.
            schema: the structure around them.

        Returns:
            The state, and the number of states found so far if this one is new; else 0.

        Raises:
            ExportError: forward reads state that no guard can watch, or an object of the user raised an
                error during the walk.
        """
        known = self._under(key, tensors)
        for position, assumed in enumerate(known):
            change = assumed.guards.accept()
            if change is None:
                if position:
                    known.insert(0, known.pop(position))
                return assumed, 0
            if position == 0:
                self.change = change
        return self._find_by_walk(key, tensors, schema, known)

    @exclusive.looking()
    def _find_by_walk(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor],
        schema: io_schema.Schema,
        known: list[GuardedState],
    ) -> tuple[GuardedState, int]:
        walked: list[tuple[WriteOnlyState, Dependencies]] = []

        def walk(unread: WriteOnlyState) -> Dependencies:
            found = next((found for known, found in walked if known == unread), None)
            if found is None:
                found = self._walk(tensors, schema, unread)
                walked.append((unread, found))
            return found

        asked = self._asks_parameters
        read = walk(known[0].unread if known else NOTHING)
        more = read.reads_strides > self._reads_strides or read.reads_offsets > self._reads_offsets
        if more or asked != self._asks_parameters:
            self._reads_strides |= read.reads_strides
            self._reads_offsets |= read.reads_offsets
            known = self._under(key, tensors)
        for position, assumed in enumerate(known):
            found = walk(assumed.unread)
            if assumed.matches(found):
                assumed.guards, assumed.found = found.arm_guards(self._written), None
                known.insert(0, known.pop(position))
                return assumed, 0
        known.insert(0, GuardedState(walk(NOTHING), self._written))
        return known[0], len(known)

    def _under(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> list[GuardedState]:
        """Return the states to choose from, the last used first."""
        strides, offset = self._reads_strides, self._reads_offsets
        memory = tuple([memory_form(tensor, strides=strides, offset=offset) for tensor in tensors])
        parameters = tuple([type(tensor) is torch.nn.Parameter for tensor in tensors])
        return self._known.setdefault((key, memory, self._asks_parameters and parameters), [])

    @exclusive.looking()
    def after_export(
        self,
        assumed: GuardedState,
        tensors: Sequence[torch.Tensor],
        schema: io_schema.Schema,
        unread: WriteOnlyState,
    ) -> None:
        """Accept changes made by the trace itself as the same state: it runs forward, which may write.

        Args:
            assumed: the state.
            tensors: the call's.
            schema: the structure around them.
            unread: the places that the new graph writes to and does not depend on.
        """
        assumed.found = None  # it holds every value that the walk found
        if len(assumed.family.variants) > 1:
            unread = unread & assumed.unread
        if unread != assumed.unread:
            # Other parts of the walk's result count as state.
            found = self._walk(tensors, schema, unread)
            assumed.states, assumed.unread = [replace(found, walk=None)], unread
            assumed.guards = found.arm_guards(self._written)
        elif assumed.states[0].is_partial or assumed.guards.accept() is not None:
            found = self._walk(tensors, schema, unread)
            assumed.states.append(replace(found, walk=None))
            assumed.guards = found.arm_guards(self._written)

    def for_key(
        self, assumed: GuardedState, tensors: Sequence[torch.Tensor], schema: io_schema.Schema
    ) -> Dependencies:
        """Return all dependencies of a graph of the present state, for the key of the export cache.

        Args:
            assumed: the state.
            tensors: the call's.
            schema: the structure around them.
        """
        if assumed.found is not None and assumed.guards.is_exact:
            return assumed.found
        return self._walk(tensors, schema, NOTHING)

    def weights(self, assumed: GuardedState) -> tuple[tuple[str, ...], list[torch.Tensor]]:
        """Return the names of the model's parameters and buffers, and their present tensors.

        ``assumed`` is the present state. The tuple is the same object as long as the tensors are the same.
        """
        guards = assumed.guards
        kept, moves = self._tensors, guards.moves
        if kept is None or kept[0] is not guards or kept[1] != moves:
            # During an export, the model temporarily has other tensors.
            with exclusive.looking():
                named = named_tensors(self._model)
            kept = self._tensors = (guards, moves, tuple(named), list(named.values()))
        return kept[2], kept[3]

    def _walk(
        self, tensors: Sequence[torch.Tensor], schema: io_schema.Schema, unread: WriteOnlyState
    ) -> Dependencies:
        try:
            found = dependencies(
                self._model,
                tensors,
                schema,
                with_hooks=False,
                inlines_functions=self._inlines_functions,
                unread=unread,
            )
        except Unkeyable as reason:
            raise ExportError(
                f"{type(self._model).__name__}: the model's dependencies cannot be determined, as {reason}. "
                f"Keep such objects out of the state that forward reads"
            ) from reason.__cause__
        if found.unseen and not self._trust:
            raise ExportError(
                f"{type(self._model).__name__}: {found.unseen[0]}. If it never changes, pass "
                f'torch2ort.Options(guards="trust")'
            )
        self.asks_types = self.asks_types or found.asks_types
        self._asks_parameters = self._asks_parameters or found.asks_parameters
        return found
