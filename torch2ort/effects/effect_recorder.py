"""One traced call of forward, watched for what it does beside computing."""

from __future__ import annotations

from types import TracebackType

import torch

from torch2ort.effects.read_before_write import Reads
from torch2ort.effects.side_effects import NO_EFFECTS, Effects
from torch2ort.effects.state_diff import EffectError, Watch, writes_of
from torch2ort.effects.value_templates import Recipes


class Watched:
    """Context manager around a call of forward: afterwards the state is as before, also when it raises.

    Args:
        model: the model.
        reads: notes what the call reads of what it writes; ``None`` if nobody asks.
        left: whether runs of the graph leave what the call leaves.

    Attributes:
        tensors: what the call left in Python objects, once :meth:`find` was called.
        places: where it left each.
        effects: how a run of the graph leaves the same.
        dropped: what the call did and no run does, if ``left`` is false: ``changes X``.
    """

    def __init__(self, model: torch.nn.Module, reads: Reads | None, *, left: bool) -> None:
        self._model, self._reads, self._left = model, reads, left
        self.dropped = ""
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []
        self.effects: Effects = NO_EFFECTS

    def __enter__(self) -> Watched:
        self._watch = Watch(self._model)
        if self._reads is not None:
            self._reads.begin(self._watch.reached)
        return self

    def find(self, *, known: bool = True) -> None:
        """Look at what the call did.

        Args:
            known: whether tensors that were there before are told from new ones.

        Raises:
            EffectError: a run of a graph cannot do it.
        """
        if self._reads is not None:
            return
        there = self._watch.reached.was_there
        recipes = Recipes(there if known else lambda v: not isinstance(v, torch.Tensor) and there(v))
        try:
            writes, taken = writes_of(self._watch.changed(guarded=self._left), recipes)
        except EffectError as error:
            if self._left or error.matters:
                raise
            self.dropped = error.what
            return
        if not self._left:
            self.dropped = f"changes {writes[0].place}" if writes else ""
            return
        self.tensors, self.places = recipes.tensors, recipes.places
        self.effects = Effects(tuple(writes), taken=tuple(taken), constants=recipes.constants)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reads is not None:
            self._reads.end()
        self._watch.restore()
