"""Private names of the dispatcher, and the versions tried.

| name | tried on |
| --- | --- |
| torch._ops.OpOverload, OpOverload._schema | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
| torch._VF.lstm, gru, rnn_tanh, rnn_relu | 2.13.0, 2.15.0 |
| torch._subclasses.fake_tensor.unset_fake_temporarily, torch._C._DisablePythonDispatcher | 2.13.0 |
| torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey | 2.11-2.15.0 |
| torch._is_zerotensor | 2.13.0 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    need(OpOverload, "_schema")
    need(torch._C, "_DisablePythonDispatcher", "_SetExcludeDispatchKeyGuard", "DispatchKey")
    need(torch, "_is_zerotensor")
    need(torch._VF, "lstm", "gru", "rnn_tanh", "rnn_relu")

# What nn.LSTM, nn.GRU and nn.RNN call.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrent(name: str) -> Callable[..., Any]:
    """The function behind a recurrent layer of torch.nn; ``name`` is one of :data:`RECURRENT`."""
    function: Callable[..., Any] = getattr(torch._VF, name)
    return function


def is_abstract(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some of ``tensors`` have sizes only, and no data."""
    # Asked in front of each kernel that runs: a generator would cost a microsecond.
    for tensor in tensors:  # noqa: SIM110
        if type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor):
            return True
    return False


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """Context in which tensors are real and operators are those of eager PyTorch, inside a fake kernel.

    A trace puts Python code in the place of some composites, which goes other ways than they do.
    """
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():
        yield


@contextlib.contextmanager
def from_the_top() -> Iterator[None]:
    """Context in which operators meet autograd and autocast, as where a user calls them.

    A fake kernel is run below both.
    """
    keys = (
        getattr(torch._C.DispatchKey, n) for n in ("AutogradFunctionality", "AutocastCPU", "AutocastCUDA")
    )
    with contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def schema_of(operator: Any) -> Any:
    """The schema of an overload: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return operator._schema


def output_count(operator: Any) -> int:
    """The number of tensors that an overload returns."""
    return len(operator._schema.returns)


# Whether a tensor stands for zeros that lie nowhere.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch._is_zerotensor
