"""What ``torch.autocast`` is set to: a part of what a call of a Function, and a graph, depends on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch2ort._native import Switches
from torch2ort._torch import autograd_functions as private

DEVICES = ("cpu", "cuda")
# What `torch.autocast` takes; it warns of others, and stays off.
_LOWER = frozenset({torch.bfloat16, torch.float16})
_AS_IT_IS = contextlib.nullcontext()


class Autocast(NamedTuple):
    """Settings of ``torch.autocast`` on one thread.

    Attributes:
        devices: of each kind of device whether autocast is on, and the dtype that it casts to if it is.
        cache: whether it keeps what it casted parameters to.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def now() -> Autocast:
        """The settings of this thread; one object for all that are equal."""
        return settings.now()

    @staticmethod
    def of_call() -> Autocast | None:
        """The settings of this thread as those of a site; ``None`` if autocast is off."""
        state = Autocast.now()
        # A cast that is kept would be of a tensor that is the runtime's, and held for longer.
        return state._replace(cache=False) if state.is_on else None

    @staticmethod
    def is_on_now() -> bool:
        """:attr:`is_on` of the settings of this thread; several calls a step ask."""
        return private.is_autocast_on() and True in map(torch.is_autocast_enabled, DEVICES)

    @property
    def is_on(self) -> bool:
        """Whether operators of some device get other types than they are given."""
        return any(on for _, on, _ in self.devices)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices on which it is on."""
        return tuple(kind for kind, on, _ in self.devices if on)

    def description(self) -> str:
        """One text a value, for keys."""
        devices = ", ".join(f"{kind} {on} {dtype}" for kind, on, dtype in self.devices)
        return f"{devices}, cache {self.cache}"

    def dump(self) -> dict[str, str]:
        """The kinds of devices on which it is on, with its dtypes, as JSON holds them."""
        return {kind: str(dtype).removeprefix("torch.") for kind, on, dtype in self.devices if on}


@functools.cache
def _of(cache: bool, *switches: Any) -> Autocast:
    """``switches``: whether it is on for each kind of device, and then the dtype for each."""
    kinds = len(DEVICES)
    return Autocast(tuple(zip(DEVICES, switches[:kinds], switches[kinds:], strict=True)), cache)


# :meth:`Autocast.now` of these is what other switches are read with.
settings = Switches(
    (
        (torch.is_autocast_cache_enabled, ()),
        *((torch.is_autocast_enabled, (kind,)) for kind in DEVICES),
        *((torch.get_autocast_dtype, (kind,)) for kind in DEVICES),
    ),
    _of,
)


def loaded(data: dict[str, str]) -> Autocast | None:
    """What :meth:`Autocast.dump` wrote; ``None`` for what is off.

    Raises:
        ValueError: it is something else.
    """
    if not data:
        return None
    found = {kind: getattr(torch, name, None) for kind, name in data.items()}
    if not found.keys() <= set(DEVICES) or not all(isinstance(d, torch.dtype) for d in found.values()):
        raise ValueError(f"not a setting of autocast: {data!r}")
    dtypes = ((kind, found.get(kind) or torch.get_autocast_dtype(kind)) for kind in DEVICES)
    return Autocast(tuple((kind, kind in found, dtype) for kind, dtype in dtypes), False)


@contextlib.contextmanager
def entered(state: Autocast | None) -> Iterator[None]:
    """Run with these settings; as before afterwards. ``None`` changes nothing."""
    if state is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, on, dtype in state.devices:
            # What this build has no device for is off, and would warn that it stays so.
            if on or torch.is_autocast_enabled(kind):
                lower = dtype if dtype in _LOWER else torch.bfloat16
                stack.enter_context(torch.autocast(kind, lower, on, state.cache))
            if on and dtype not in _LOWER:
                stack.enter_context(_casting_to(kind, dtype))
        yield


@contextlib.contextmanager
def _casting_to(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Cast to a dtype that ``torch.autocast`` does not take, and ``torch.set_autocast_dtype`` does."""
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


def off() -> contextlib.AbstractContextManager[None]:
    """Run without autocast: what is inside has eager's casts already, or is no model's code."""
    if not private.is_autocast_on():
        return _AS_IT_IS
    now = Autocast.now()
    return entered(Autocast(tuple((kind, False, dtype) for kind, _, dtype in now.devices), now.cache))


def under(state: Autocast | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as it runs with these settings."""
    if state is None or not state.is_on:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with entered(state):
            return function(*args, **kwargs)

    return call
