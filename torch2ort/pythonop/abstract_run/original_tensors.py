"""Arguments that are tensors of the model or its caller, and not computed: Functions get those very objects.

A Function may compare such a tensor with a parameter of a module that it gets, ask autograd for its gradient,
or read attributes that a library set on it. An abstract run gets a tensor of the same kind and attributes, in
the place of the model's own.
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
    """The tensors of a model and its caller, for which a trace puts others in.

    Args:
        model: before it is traced.
        inputs: the caller's tensors; ``None`` if no Function gets an original.

    Attributes:
        are_trained: whether backwards are looked at.
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
        """Those of a single call, by argument position; ``is_trained``: see :attr:`are_trained`."""
        made = cls(None, ())
        made._of_call, made.are_trained = tensors, is_trained
        return made

    def are_traced_as(self, tensors: Sequence[torch.Tensor]) -> None:
        """Say what the trace has for the caller's tensors."""
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
        """The original of each argument that has one."""
        return self._found.get(site, {})

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the model's modules hold its own tensors inside."""
        with self._tables_with({id(v): v for _, before in self._tables for v in before.values()}):
            yield

    def stand_ins(self, site: Site, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensors`` of a run, those among them that are originals with their kind and attributes."""
        originals = self.of(site)
        return [
            _like(originals[position], tensor) if position in originals else tensor
            for position, tensor in zip(site.tensor_positions, tensors, strict=True)
        ]

    @contextlib.contextmanager
    def held(self, site: Site, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have the model's modules hold :meth:`stand_ins` in the place of the originals inside."""
        pairs = zip(site.tensor_positions, tensors, strict=True)
        originals = self.of(site)
        given = {id(originals[position]): tensor for position, tensor in pairs if position in originals}
        with self._tables_with(given) if given else contextlib.nullcontext():
            # Who keeps a tensor of the run is asked while this is left.
            given.clear()
            del tensors, pairs
            yield

    @contextlib.contextmanager
    def same_gradients(self) -> Iterator[None]:
        """Have what modules hold keep its ``grad``, whatever is backpropagated inside."""
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
        """Have modules hold tensors inside, by the ids of the originals."""
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
    """``tensor`` as the parameter that ``original`` is, if it is one, with its attributes."""
    if isinstance(original, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=original.requires_grad)
    for name, value in vars(original).items():
        if not hasattr(tensor, name):
            setattr(tensor, name, _copied(value))
    return tensor


def _copied(value: Any) -> Any:
    """A copy, so that nothing that a run writes into it reaches the model; some things have none."""
    if isinstance(value, torch.Tensor):
        # Writes to older tensors are undone.
        return value
    try:
        return copy.copy(value)
    except Exception:
        return value
