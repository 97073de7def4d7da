"""Private names of the dispatcher, and the versions tried.

| name | tried on |
| --- | --- |
| torch._ops.OpOverload, OpOverload._schema | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
| torch._VF.lstm, gru, rnn_tanh, rnn_relu | 2.13.0, 2.15.0 |
| torch._subclasses.fake_tensor.unset_fake_temporarily, torch._C._DisablePythonDispatcher | 2.13.0 |
| torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey | 2.11-2.15.0 |
| torch._is_zerotensor | 2.13.0 |
| torch._higher_order_ops.effects.has_effects | 2.13.0 |
| torch.utils._python_dispatch.TorchDispatchMode, _disable_current_modes | 2.11-2.15.0 |
| torch._C._dispatch_has_kernel_for_dispatch_key | 2.11-2.15.0 |
| aten::_linalg_det, aten::_linalg_slogdet: the tensors that they save | 2.11-2.15.0 |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._higher_order_ops import effects
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    need(OpOverload, "_schema")
    need(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        "_DisablePythonDispatcher",
        "_SetExcludeDispatchKeyGuard",
        "DispatchKey",
    )
    need(torch, "_is_zerotensor")
    need(effects, "has_effects")
    need(torch._VF, "lstm", "gru", "rnn_tanh", "rnn_relu")

# These save the LU decomposition of the matrix for backward, or that of its transpose where the matrix is
# row-major; autograd's formula reads the matrix's memory layout.
SAVES_LU_BY_LAYOUT = frozenset({torch.ops.aten._linalg_det.default, torch.ops.aten._linalg_slogdet.default})

# The functions of torch._VF that nn.LSTM, nn.GRU and nn.RNN call.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is fake: it has sizes, but no data."""
    return isinstance(tensor, FakeTensor)


def recurrent(name: str) -> Callable[..., Any]:
    """Return the function that a recurrent layer of torch.nn calls; ``name`` is one of :data:`RECURRENT`."""
    function: Callable[..., Any] = getattr(torch._VF, name)
    return function


def has_effects(target: object) -> bool:
    """Return True if an operator has a side effect, as torch's print has."""
    return bool(effects.has_effects(target))


def is_abstract(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if some of ``tensors`` have sizes only, and no data."""
    # Called before each kernel: a generator expression would cost a microsecond.
    for tensor in tensors:  # noqa: SIM110
        if type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor):
            return True
    return False


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """Context in which tensors are real and operators are those of eager PyTorch, inside a fake kernel.

    A trace replaces some composites by Python code, which calls other operators than they do.
    """
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():
        yield


@contextlib.contextmanager
def with_autograd_and_autocast() -> Iterator[None]:
    """Context in which operators are dispatched to autograd and autocast, as where a user calls them.

    A fake kernel runs below both.
    """
    keys = (
        getattr(torch._C.DispatchKey, n) for n in ("AutogradFunctionality", "AutocastCPU", "AutocastCUDA")
    )
    with contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def schema_of(operator: Any) -> Any:
    """Return the schema of an overload: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return operator._schema


def output_count(operator: Any) -> int:
    """Return the number of tensors that an overload returns."""
    return len(operator._schema.returns)


# True for a tensor of zeros that has no memory (a ZeroTensor of torch).
is_zero_tensor: Callable[[torch.Tensor], bool] = torch._is_zerotensor


def with_data() -> contextlib.AbstractContextManager[Any]:
    """Context in which operators compute with tensors that have data, inside a trace."""
    manager: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return manager


_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@functools.lru_cache(maxsize=4096)
def has_autocast(operator: Any, kinds: tuple[str, ...]) -> bool:
    """Return True if autocast has a kernel of the operator itself for one of these kinds of devices."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), _AUTOCAST_KEYS[kind]) for kind in kinds)


class OperatorRecorder(TorchDispatchMode):
    """A mode that records the operators that run in it, below autocast and autograd.

    Attributes:
        calls: each operator that returned tensors, its tensor arguments, and the tensors that it returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        result = func(*args, **(kwargs or {}))
        given = _tensors((result,))
        if given:
            self.calls.append((func, _tensors((*args, *(kwargs or {}).values())), given))
        return result


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def traced(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.Graph:
    """Trace the operators that ``function`` calls on fake tensors, below autocast and autograd."""
    graph: torch.fx.Graph = make_fx(function)(*values).graph
    return graph
