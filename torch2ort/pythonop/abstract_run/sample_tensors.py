"""The tensors that Functions get when the model runs on the sample, for those that must see real ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.pythonop.site import Site
from torch2ort.sizes.symbols import has_hint, size_hint


class NeedsSample(BaseException):
    """Ends a trace: the calls of a Function must be recorded. No code of a user's may catch it.

    Attributes:
        function: the Function.
    """

    def __init__(self, function: type) -> None:
        super().__init__(function)
        self.function = function


class Sample:
    """What Functions got in one eager run of the model.

    Args:
        known: arguments of the call, by position, that are known without such a run. There is no other trace
            then after one that :class:`NeedsSample` ended.

    Attributes:
        calls: the tensors of each call, in order, of the Functions that were recorded.
        sizes_needed: whether a trace failed that knew no sizes of what ran on real tensors only.
        real_only: Functions whose runs on fake tensors are left out.
        has_originals: whether runs give Functions the model's own tensors, and its caller's.
        known: see above.
    """

    def __init__(self, known: Mapping[int, torch.Tensor] | None = None) -> None:
        self.calls: dict[type, list[list[torch.Tensor]]] = {}
        self.sizes_needed = False
        self.has_originals = False
        self.real_only: set[type] = set()
        self.known = known

    def leave_out_fake_runs(self, function: type) -> None:
        """Begin another trace, which does not run a Function on fake tensors; does nothing in the only one.

        Raises:
            NeedsSample: always, but in the only trace.
        """
        if self.known is None:
            self.real_only.add(function)
            raise NeedsSample(function)

    def record(self, function: type, arguments: Sequence[Any]) -> None:
        """Keep the tensors of a call, if somebody asked for those of ``function``."""
        if function in self.calls:
            tensors = [a.detach().clone() for a in arguments if isinstance(a, torch.Tensor)]
            self.calls[function].append(tensors)


_places: weakref.WeakKeyDictionary[Site, tuple[Sample, int]] = weakref.WeakKeyDictionary()


def place(site: Site, sample: Sample, number: int) -> None:
    """Say which call of its Function in the model's forward ``site`` is."""
    _places[site] = sample, number


def number_of(site: Site) -> int:
    """Which call of its Function in the model's forward ``site`` is."""
    return _places[site][1]


def sizes_needed(site: Site) -> bool:
    """Whether ``site``'s outputs must have the sizes that they had on the sample."""
    return site in _places and _places[site][0].sizes_needed


def known_arguments(site: Site) -> Mapping[int, torch.Tensor]:
    """Arguments of a call, by position, that are known where no run of the model was recorded."""
    return (_places[site][0].known if site in _places else None) or {}


def runs_on_fake_tensors(site: Site) -> bool:
    """Whether ``site`` may be run on fake tensors."""
    return site not in _places or site.function not in _places[site][0].real_only


def leave_out_fake_runs(site: Site) -> None:
    """Have the trace begin again without runs of ``site``'s Function on fake tensors, where it can.

    Raises:
        NeedsSample: it can.
    """
    if site in _places and site.function is not None:
        _places[site][0].leave_out_fake_runs(site.function)


def sample_of(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copies of what the call gets on the sample; ``None`` if nobody can know.

    Args:
        site: the call.
        inputs: its tensors in the trace.

    Raises:
        NeedsSample: nobody recorded it yet.
    """
    if site not in _places or site.function is None:
        return None
    sample, number = _places[site]
    if site.function not in sample.calls:
        raise NeedsSample(site.function)
    calls = sample.calls[site.function]
    tensors = calls[number] if number < len(calls) else []
    if len(tensors) != len(inputs) or not all(map(_may_be, inputs, tensors)):
        return None
    return [t.clone() for t in tensors]


def _may_be(traced: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether a tensor of the trace is one of the sample's, as far as its sizes are known."""
    return (traced.dtype, traced.dim()) == (real.dtype, real.dim()) and all(
        not has_hint(size) or size_hint(size) == number
        for size, number in zip(traced.shape, real.shape, strict=True)
    )
