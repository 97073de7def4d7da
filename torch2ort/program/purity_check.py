"""Observation of a Function during a trace, for effects besides its operators, which a graph would lose.

Objects, tensors and generators are restored. The Function's code ends before a call that cannot be undone.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.effects.reachable_state import FunctionState
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.io_calls import in_front_of_calls_outside
from torch2ort.pythonop.abstract_run.object_rollback import Generators, change
from torch2ort.pythonop.abstract_run.tensor_rollback import TensorRollback, places

# A state that no Function sets by chance.
_SEED = 0x70726F6265


class IrreversibleCallError(BaseException):
    """Raised to end a Function's code before a call that cannot be undone. User code must not catch it."""


class PurityObserver:
    """Replacement of a site's Function during a trace of its operators.

    Args:
        site: the call.
        counts: True if it may write to Python objects, such as a counter of calls, and to its arguments.

    Attributes:
        function: the Function to apply instead.
        observed_effect: the effect besides computing, as the end of a sentence; empty if there is none.
    """

    def __init__(self, site: Site, *, counts: bool = False) -> None:
        assert site.function is not None
        self._site, self._counts = site, counts
        self.function = _with_watch(site.function, self._running)
        self.observed_effect = ""

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the Function's effects, and undo them afterwards."""
        generators = Generators()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            reached = FunctionState(self._site.func_name, self._site.function, self._site.constants)
            tensors = places(reached.values())
            random.seed(_SEED)
            np.random.seed(_SEED & 0xFFFFFFFF)
            seeded = Generators()
            try:
                with warnings.catch_warnings(), _type_as_in_eager(reached.asks_for_types):
                    # PyTorch names the forward of a backward that fails; here that is no code of the user's.
                    warnings.filterwarnings("ignore", "Error detected in ")
                    yield
            finally:
                for holder, contents in reached.changes():
                    if not self._counts:
                        self._note(f"it writes to {change(holder, contents)}")
                    holder.write(holder.before)
                for path, place in tensors:
                    if place.restore():
                        self._note(f"it writes to {path}")
                for name in seeded.restore():
                    self._note(f"it draws from {name}, or seeds it")
                generators.restore()

    def _note(self, what: str) -> None:
        self.observed_effect = self.observed_effect or what

    @contextlib.contextmanager
    def _running(self, method: str, arguments: Sequence[Any]) -> Iterator[None]:
        """Observe a method of the Function that is called inside, with these arguments."""
        own = [a for a in arguments if self._counts and type(a) is torch.Tensor]
        torch.default_generator.manual_seed(_SEED)
        with TensorRollback(own) as undone:
            try:
                with in_front_of_calls_outside(functools.partial(self._end, method)):
                    yield
            finally:
                if torch.initial_seed() != _SEED:
                    self._note(f"its {method} sets torch's random state")
                if undone.has_writes():
                    self._note(f"its {method} writes to a tensor that is none of its arguments")

    def _end(self, method: str, called: str) -> None:
        self._note(f"its {method} calls {called}, which no graph does")
        raise IrreversibleCallError


def _with_watch(
    function: type[torch.autograd.Function],
    running: Callable[[str, Sequence[Any]], contextlib.AbstractContextManager[None]],
) -> type[torch.autograd.Function]:
    """Return a subclass of ``function`` that calls each of its methods inside of ``running``."""

    def watched(name: str) -> Any:
        method = getattr(function, name)

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with running(name, args):
                return method(*args, **kwargs)

        return staticmethod(run)

    own = [
        name
        for name in ("forward", "setup_context", "backward", "vjp")
        if getattr(function, name) is not getattr(torch.autograd.Function, name)
    ]
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__}
    made: Any = type(function)
    subclass: type[torch.autograd.Function] = made(
        function.__name__, (function,), {**names, **{name: watched(name) for name in own}}
    )
    return subclass


class _Asked(type):
    """The metaclass of the replacement of ``type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = type(args[0])
        if found is type:
            return cls
        return torch.Tensor if issubclass(found, private.TRACED_TENSORS) else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)


class _Type(type, metaclass=_Asked):
    """Replacement of ``type`` that returns eager PyTorch's class for tensors of a trace."""


@contextlib.contextmanager
def _type_as_in_eager(modules: list[dict[str, Any]]) -> Iterator[None]:
    """Let code that calls ``type(x)`` get the same result as in eager PyTorch.

    Args:
        modules: the globals of that code.
    """
    for names in modules:
        names["type"] = _Type
    try:
        yield
    finally:
        for names in modules:
            names.pop("type", None)
