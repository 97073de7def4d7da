"""Observation of one traced call of forward, for its side effects."""

from __future__ import annotations

from types import TracebackType

import torch

from torch2ort.effects.read_before_write import ReadRecorder
from torch2ort.effects.side_effects import NO_EFFECTS, Effects
from torch2ort.effects.state_diff import EffectError, Watch, writes_of
from torch2ort.effects.value_templates import ValueTemplates


class SideEffectRecorder:
    """Context manager around a call of forward; it restores the state afterwards, also when forward raises.

    Args:
        model: the model.
        reads: records the places that the call reads before it writes them; ``None`` to find effects instead.
        left: True if runs of the graph repeat the effects of the call.

    Attributes:
        tensors: tensors that the call left in Python objects, available after :meth:`find`.
        places: the place of each.
        effects: the same effects for a run of the graph.
        dropped: an effect of the call that no run repeats, if ``left`` is false: ``changes X``.
    """

    def __init__(self, model: torch.nn.Module, reads: ReadRecorder | None, *, left: bool) -> None:
        self._model, self._reads, self._left = model, reads, left
        self.dropped = ""
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []
        self.effects: Effects = NO_EFFECTS

    def __enter__(self) -> SideEffectRecorder:
        self._watch = Watch(self._model)
        if self._reads is not None:
            self._reads.begin(self._watch.reached)
        return self

    def find(self, *, known: bool = True) -> None:
        """Find the effects of the call.

        Args:
            known: True if tensors that existed before are distinguished from new ones.

        Raises:
            EffectError: a run of a graph cannot repeat an effect.
        """
        if self._reads is not None:
            return
        there = self._watch.reached.was_there
        templates = ValueTemplates(there if known else lambda v: not isinstance(v, torch.Tensor) and there(v))
        try:
            writes, taken = writes_of(self._watch.changes(guarded=self._left), templates)
        except EffectError as error:
            if self._left or error.matters:
                raise
            self.dropped = error.what
            return
        if not self._left:
            self.dropped = f"changes {writes[0].place}" if writes else ""
            return
        self.tensors, self.places = templates.tensors, templates.places
        self.effects = Effects(tuple(writes), one_time_writes=tuple(taken), constants=templates.constants)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reads is not None:
            self._reads.end()
        self._watch.restore()
