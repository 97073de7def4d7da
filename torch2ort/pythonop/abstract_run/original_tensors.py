"""Arguments that are tensors of the model or its caller, not computed ones: Functions get those very objects.

A Function may compare such a tensor with a parameter of a module that it gets, ask autograd for its gradient,
or read attributes that a library set on it. An abstract run gets a tensor of the same kind and attributes
instead of the model's own.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch2ort.pythonop.site import Site

_Table = dict[str, Any]


class Originals:
    """The tensors of a model and its caller, which a trace replaces by others.

    Args:
        model: the model, before it is traced.
        inputs: the caller's tensors; ``None`` if no Function gets an original.

    Attributes:
        are_trained: True if backward methods are observed.
    """

    def __init__(self, model: torch.nn.Module | None, inputs: Sequence[torch.Tensor] | None = None) -> None:
        modules = () if model is None else model.modules()
        tables: list[_Table] = [t for module in modules for t in (module._parameters, module._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        self._inputs = inputs
        self.are_trained = inputs is not None
        self._traced: list[torch.Tensor] = []
        self._of_call: Mapping[int, torch.Tensor] = {}
        self._found: weakref.WeakKeyDictionary[Site, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()

    @classmethod
    def of_call(cls, tensors: Mapping[int, torch.Tensor], *, is_trained: bool) -> Originals:
        """Return the originals of a single call, by argument position, with :attr:`are_trained` set."""
        made = cls(None, ())
        made._of_call, made.are_trained = tensors, is_trained
        return made

    def are_traced_as(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the tensors that replace the caller's in the trace."""
        self._traced = list(tensors)

    def find(self, site: Site, values: Sequence[Any]) -> None:
        """Fill :attr:`Site.originals`.

        Args:
            site: a call.
            values: its arguments in the trace.
        """
        if self._inputs is None:
            return
        known = {id(t): real for t, real in zip(self._traced, self._inputs, strict=False)}
        for table, before in self._tables:
            known.update((id(value), before[name]) for name, value in table.items() if name in before)
        found = dict(self._of_call) or {
            i: known[id(v)] for i, v in enumerate(values) if isinstance(v, torch.Tensor) and id(v) in known
        }
        site.originals = tuple(found)
        self._found[site] = found

    def of(self, site: Site) -> dict[int, torch.Tensor]:
        """Return argument position -> original, for the arguments that have one."""
        return self._found.get(site, {})

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the model's own tensors back into its modules inside of the context."""
        with self._tables_with({id(v): v for _, before in self._tables for v in before.values()}):
            yield

    def stand_ins(self, site: Site, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``tensors`` of a run, with the kind and attributes of the originals that they replace."""
        originals = self.of(site)
        return [
            _like(originals[position], tensor) if position in originals else tensor
            for position, tensor in zip(site.tensor_positions, tensors, strict=True)
        ]

    @contextlib.contextmanager
    def place_stand_ins(self, site: Site, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace the originals in the model's modules by :meth:`stand_ins` inside of the context."""
        pairs = zip(site.tensor_positions, tensors, strict=True)
        originals = self.of(site)
        given = {id(originals[position]): tensor for position, tensor in pairs if position in originals}
        with self._tables_with(given) if given else contextlib.nullcontext():
            # Code that keeps a tensor of the run is searched for while this frame is alive.
            given.clear()
            del tensors, pairs
            yield

    @contextlib.contextmanager
    def same_gradients(self) -> Iterator[None]:
        """Restore ``grad`` of the modules' tensors after a backpropagation inside of the context."""
        held = [t for table, _ in self._tables for t in table.values() if t is not None and t.is_leaf]
        before = [(tensor, tensor.grad) for tensor in held]
        try:
            yield
        finally:
            for tensor, gradient in before:
                if tensor.grad is not gradient:
                    tensor.grad = gradient

    @contextlib.contextmanager
    def _tables_with(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Replace originals in modules, by their ids, inside of the context."""
        present = [(table, dict(table)) for table, _ in self._tables]
        try:
            for table, before in self._tables:
                table.update({name: tensors[id(v)] for name, v in before.items() if id(v) in tensors})
            yield
        finally:
            for table, values in present:
                table.clear()
                table.update(values)


def _like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the attributes of ``original``, and as a parameter if that is one."""
    if isinstance(original, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=original.requires_grad)
    for name, value in vars(original).items():
        if not hasattr(tensor, name):
            setattr(tensor, name, _copied(value))
    return tensor


def _copied(value: Any) -> Any:
    """Return a copy, so that writes of a run do not reach the model, or the object if it has no copy."""
    if isinstance(value, torch.Tensor):
        # Writes to older tensors are undone.
        return value
    try:
        return copy.copy(value)
    except Exception:
        return value
