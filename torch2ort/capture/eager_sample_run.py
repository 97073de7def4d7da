"""Eager run of the model on its sample, for Functions that an export can only run on real tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.capture.sample_call import Call, Purpose
from torch2ort.graph.identical_inputs import as_passed
from torch2ort.graph.scalar_inputs import with_values
from torch2ort.pythonop.abstract_run.object_rollback import Generators, restoring_state
from torch2ort.pythonop.abstract_run.sample_tensors import Sample
from torch2ort.pythonop.abstract_run.tensor_rollback import TensorRollback
from torch2ort.pythonop.interception import ArgumentRecorder


def run_on_sample(
    name: str,
    model: torch.nn.Module,
    sample: Sample,
    runs: contextlib.AbstractContextManager[Callable[[], Any]],
) -> None:
    """Run ``model`` as eager PyTorch does, without effects besides those on ``sample``.

    Args:
        name: name of the model for messages.
        model: the model in the mode that is exported.
        sample: receives the arguments of Functions.
        runs: see :func:`eager_runs`.

    Raises:
        Exception: any error that the model raises.
    """
    generators = Generators()
    try:
        with restoring_state(name, model, code=True), ArgumentRecorder(sample), runs as run:
            run()
    finally:
        generators.restore()


@contextlib.contextmanager
def eager_runs(model: torch.nn.Module, call: Call) -> Iterator[Callable[[], Any]]:
    """Yield a function that runs ``model`` on its sample; writes to tensors are undone afterwards.

    Args:
        model: the model in the mode that is exported.
        call: the sample call; its tensors are not written to.
    """
    copies = as_passed([t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors], call.same)
    bound = io_schema.unflatten(with_values(copies, call.numbers), call.schema)
    args, kwargs = call.signature.unbind(bound)
    with _other_buffers(model), TensorRollback(copies):
        yield lambda: (model.forward if call.purpose is Purpose.MODULE else model)(*args, **kwargs)


@contextlib.contextmanager
def _other_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Replace buffers by copies: an autograd graph of the user's may have saved those, and detects writes."""
    copies: dict[int, torch.Tensor] = {}
    holders = {id(m._buffers): m._buffers for m in model.modules()}
    before = [(buffers, dict(buffers)) for buffers in holders.values()]
    for buffers, values in before:
        for name, buffer in values.items():
            if buffer is not None:
                buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for buffers, values in before:
            buffers.clear()
            buffers.update(values)
