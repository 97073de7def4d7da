"""Recorded arguments of Functions in a run of the model on the sample, for those that need real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.pythonop.site import Site
from torch2ort.sizes.symbols import has_hint, size_hint


class NeedsSample(BaseException):
    """Signal that ends a trace, as the calls of a Function must be recorded. User code must not catch it.

    Attributes:
        function: the Function.
    """

    def __init__(self, function: type) -> None:
        super().__init__(function)
        self.function = function


class Sample:
    """Tensor arguments of Functions in one eager run of the model.

    Args:
        known: arguments of the call, by position, that are known without such a run. In that case no trace
            follows one that :class:`NeedsSample` ended.

    Attributes:
        calls: for each recorded Function, the tensors of its calls, in order.
        sizes_needed: True if a trace failed in which the output sizes of Functions on real tensors were
            unknown.
        real_only: Functions that are not run on fake tensors.
        has_originals: True if runs pass the model's own tensors, and its caller's, to Functions.
        known: see above.
    """

    def __init__(self, known: Mapping[int, torch.Tensor] | None = None) -> None:
        self.calls: dict[type, list[list[torch.Tensor]]] = {}
        self.sizes_needed = False
        self.has_originals = False
        self.real_only: set[type] = set()
        self.known = known

    def leave_out_fake_runs(self, function: type) -> None:
        """Restart the trace without runs of a Function on fake tensors, unless there is only one trace.

        Raises:
            NeedsSample: always, unless there is only one trace.
        """
        if self.known is None:
            self.real_only.add(function)
            raise NeedsSample(function)

    def record(self, function: type, arguments: Sequence[Any]) -> None:
        """Store the tensors of a call if calls of ``function`` are recorded."""
        if function in self.calls:
            tensors = [a.detach().clone() for a in arguments if isinstance(a, torch.Tensor)]
            self.calls[function].append(tensors)


_places: weakref.WeakKeyDictionary[Site, tuple[Sample, int]] = weakref.WeakKeyDictionary()


def place(site: Site, sample: Sample, number: int) -> None:
    """Set the number of ``site`` among the calls of its Function in the model's forward."""
    _places[site] = sample, number


def number_of(site: Site) -> int:
    """Return the number of ``site`` among the calls of its Function in the model's forward."""
    return _places[site][1]


def sizes_needed(site: Site) -> bool:
    """Return True if ``site``'s outputs must have the sizes that they had on the sample."""
    return site in _places and _places[site][0].sizes_needed


def known_arguments(site: Site) -> Mapping[int, torch.Tensor]:
    """Return the arguments of a call, by position, that are known without a recorded run of the model."""
    return (_places[site][0].known if site in _places else None) or {}


def runs_on_fake_tensors(site: Site) -> bool:
    """Return True if ``site`` may be run on fake tensors."""
    return site not in _places or site.function not in _places[site][0].real_only


def leave_out_fake_runs(site: Site) -> None:
    """Restart the trace without runs of ``site``'s Function on fake tensors, if that is possible.

    Raises:
        NeedsSample: it is possible.
    """
    if site in _places and site.function is not None:
        _places[site][0].leave_out_fake_runs(site.function)


def sample_of(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return copies of the call's tensors on the sample; ``None`` if they are unknown.

    Args:
        site: the call.
        inputs: its tensors in the trace.

    Raises:
        NeedsSample: the calls of the Function were not recorded yet.
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
    """Return True if a tensor of the trace may be one of the sample's, by dtype, rank and known sizes."""
    return (traced.dtype, traced.dim()) == (real.dtype, real.dim()) and all(
        not has_hint(size) or size_hint(size) == number
        for size, number in zip(traced.shape, real.shape, strict=True)
    )
