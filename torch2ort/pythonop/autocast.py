"""Settings of ``torch.autocast``, on which a call of a Function and a graph depend."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch2ort._native import Switches
from torch2ort._torch import autograd_functions as private

DEVICES = ("cpu", "cuda")
# Dtypes that `torch.autocast` accepts; for others it warns and stays off.
_LOWER = frozenset({torch.bfloat16, torch.float16})
_AS_IT_IS = contextlib.nullcontext()


class Autocast(NamedTuple):
    """Settings of ``torch.autocast`` on one thread.

    Attributes:
        devices: for each kind of device, whether autocast is on, and the dtype that it casts to if it is.
        cache: whether autocast caches the results of casting parameters.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def now() -> Autocast:
        """Return the settings of this thread; equal settings are one object."""
        return settings.now()

    @staticmethod
    def of_call() -> Autocast | None:
        """Return the settings of this thread for a site; ``None`` if autocast is off."""
        state = Autocast.now()
        # A cached cast would belong to a tensor of the runtime, and would outlive that tensor.
        return state._replace(cache=False) if state.is_on else None

    @staticmethod
    def is_on_now() -> bool:
        """Return :attr:`is_on` of the settings of this thread, cheaply: each step calls it repeatedly."""
        return private.is_autocast_on() and True in map(torch.is_autocast_enabled, DEVICES)

    @property
    def is_on(self) -> bool:
        """True if autocast is on for some device, so operators may get other dtypes than were passed."""
        return any(on for _, on, _ in self.devices)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices on which autocast is on."""
        return tuple(kind for kind, on, _ in self.devices if on)

    def description(self) -> str:
        """Return a text that is unique for each value, for keys."""
        devices = ", ".join(f"{kind} {on} {dtype}" for kind, on, dtype in self.devices)
        return f"{devices}, cache {self.cache}"

    def dump(self) -> dict[str, str]:
        """Return the kinds of devices on which autocast is on, with the dtypes, for JSON."""
        return {kind: str(dtype).removeprefix("torch.") for kind, on, dtype in self.devices if on}


@functools.cache
def _of(cache: bool, *switches: Any) -> Autocast:
    """Return the settings; ``switches`` is whether it is on for each kind of device, then each dtype."""
    kinds = len(DEVICES)
    return Autocast(tuple(zip(DEVICES, switches[:kinds], switches[kinds:], strict=True)), cache)


# The switches behind :meth:`Autocast.now`; other readers of switches include them.
settings = Switches(
    (
        (torch.is_autocast_cache_enabled, ()),
        *((torch.is_autocast_enabled, (kind,)) for kind in DEVICES),
        *((torch.get_autocast_dtype, (kind,)) for kind in DEVICES),
    ),
    _of,
)


def load(data: dict[str, str]) -> Autocast | None:
    """Return the settings that :meth:`Autocast.dump` wrote; ``None`` if autocast is off.

    Raises:
        ValueError: ``data`` is something else.
    """
    if not data:
        return None
    found = {kind: getattr(torch, name, None) for kind, name in data.items()}
    if not found.keys() <= set(DEVICES) or not all(isinstance(d, torch.dtype) for d in found.values()):
        raise ValueError(f"not a setting of autocast: {data!r}")
    dtypes = ((kind, found.get(kind) or torch.get_autocast_dtype(kind)) for kind in DEVICES)
    return Autocast(tuple((kind, kind in found, dtype) for kind, dtype in dtypes), False)


@contextlib.contextmanager
def autocast_context(state: Autocast | None) -> Iterator[None]:
    """Run with these settings, and restore the previous ones afterwards. ``None`` changes nothing."""
    if state is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, on, dtype in state.devices:
            # For a device that this build lacks, autocast is off, and would warn that it stays off.
            if on or torch.is_autocast_enabled(kind):
                lower = dtype if dtype in _LOWER else torch.bfloat16
                stack.enter_context(torch.autocast(kind, lower, on, state.cache))
            if on and dtype not in _LOWER:
                stack.enter_context(_casting_to(kind, dtype))
        yield


@contextlib.contextmanager
def _casting_to(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Cast to a dtype that ``torch.autocast`` does not accept, but ``torch.set_autocast_dtype`` does."""
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


def off() -> contextlib.AbstractContextManager[None]:
    """Run without autocast: the code inside already contains eager PyTorch's casts, or is not the model's."""
    if not private.is_autocast_on():
        return _AS_IT_IS
    now = Autocast.now()
    return autocast_context(
        Autocast(tuple((kind, False, dtype) for kind, _, dtype in now.devices), now.cache)
    )


def with_autocast(state: Autocast | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, run with these settings."""
    if state is None or not state.is_on:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast_context(state):
            return function(*args, **kwargs)

    return call
