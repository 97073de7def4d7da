"""Every private name of torch that torch2ort.dynamo touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._dynamo.backends.common.aot_autograd | 2.13.0 |
| torch._functorch.config (donated_buffer, force_non_lazy_backward_lowering) | 2.13.0 |
| torch._C._autograd._get_current_graph_task_keep_graph | 2.13.0 |
| torch._C._jit_resolve_packet | 2.13.0 |
| torch._guards.tracing, TracingContext (fw_metadata.bw_donated_idxs) | 2.13.0 |
| torch._ops (HigherOrderOperator, OpOverload) | 2.13.0 |
| torch._subclasses.fake_tensor (FakeTensor, unset_fake_temporarily) | 2.13.0 |
| torch._subclasses.fake_tensor.FakeTensorMode.from_tensor | 2.13.0 |

To be tried up to 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch2ort.versions import private_names

with private_names("torch"):
    from functorch.compile import default_partition as default_partition  # public, but without types
    from torch._dynamo.backends.common import aot_autograd as aot_autograd
    from torch._functorch import config
    from torch._guards import TracingContext, tracing
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """Have AOTAutograd compile backward together with forward, and allow ``retain_graph=True``."""
    with config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True):
        yield


def lend_no_buffers() -> None:
    """Note that backward writes to nothing that it is given, so that it may run twice.

    To be called while forward is compiled. torch takes what nobody noted for the contrary.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@contextlib.contextmanager
def apart(graph: torch.fx.Graph) -> Iterator[None]:
    """Keep what is done here from the trace that is under way.

    Args:
        graph: of that trace.
    """
    mode = _fake_mode(graph)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        if mode is not None:
            stack.enter_context(tracing(TracingContext(mode)))
        yield


def fake_like(graph: torch.fx.Graph, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a graph's trace that stands for a constant."""
    mode = _fake_mode(graph)
    return value if mode is None else mode.from_tensor(value, static_shapes=True)


def empty_like(
    graph: torch.fx.Graph, shape: Sequence[int | torch.SymInt], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of a graph's trace, of sizes of that trace."""
    mode = _fake_mode(graph)
    assert mode is not None
    with mode:
        return torch.empty(shape, dtype=dtype)


def _fake_mode(graph: torch.fx.Graph) -> Any:
    for node in graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, FakeTensor):
                return part.fake_mode
    return None


def overload_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload of an ATen operator that takes these arguments."""
    found = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    overload: OpOverload = getattr(getattr(torch.ops.aten, name), found)
    return overload


def backward_keeps_graph() -> bool:
    """Whether the backward that runs now was asked to keep its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, into which dynamo does not look."""
    hidden: Callable[..., Any] = torch.compiler.disable(run, reason="it calls a compiled graph")
    return hidden


def boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """``run`` as AOTAutograd calls it: with one list, which ``run`` may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
