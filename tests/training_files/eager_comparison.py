"""Trains one model by its files and by eager PyTorch, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch2ort
from torch2ort.artifacts import TrainingSession

Batch = Any


def as_numpy(batch: Batch) -> Batch:
    """The arrays of a batch."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(as_numpy(item) for item in batch)
    if isinstance(batch, dict):
        return {key: as_numpy(item) for key, item in batch.items()}
    return batch.numpy() if isinstance(batch, torch.Tensor) else batch


def eager_loss(
    model: torch.nn.Module, batch: Batch, loss: Callable[..., torch.Tensor] | None
) -> torch.Tensor:
    if loss is not None:
        inputs, targets = batch
        return loss(call(model, inputs), targets)
    outputs = call(model, batch)
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def call(model: torch.nn.Module, inputs: Any) -> Any:
    if type(inputs) is tuple:
        return model(*inputs)
    return model(**inputs) if type(inputs) is dict else model(inputs)


def assert_trains_alike(
    model: torch.nn.Module,
    batches: Callable[[int], Batch],
    folder: Path,
    *,
    optimizer: Any,
    eager_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[..., torch.Tensor] | None = None,
    steps: int = 50,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **settings: Any,
) -> TrainingSession:
    """Compare losses, parameters and buffers of a number of steps with eager PyTorch's."""
    eager = copy.deepcopy(model)
    artifacts = torch2ort.export_training(model, batches(0), loss=loss, optimizer=optimizer, **settings)
    artifacts.save(folder)
    session = TrainingSession(folder)
    trained = [p for name, p in eager.named_parameters() if name in artifacts.description.parameters]
    for parameter in set(eager.parameters()) - set(trained):
        parameter.requires_grad_(False)
    own = eager_optimizer(trained)
    for step in range(steps):
        own.zero_grad()
        wanted = eager_loss(eager, batches(step), loss)
        wanted.backward()
        own.step()
        found = session.step(as_numpy(batches(step)))["loss"]
        np.testing.assert_allclose(found, wanted.item(), rtol=rtol, atol=atol, err_msg=f"loss of step {step}")
    session.save_checkpoint(folder / "after.safetensors")
    compare(folder / "after.safetensors", eager, artifacts.description, rtol, atol)
    return session


def compare(path: Path, eager: torch.nn.Module, description: Any, rtol: float, atol: float) -> None:
    from safetensors.torch import load_file

    found = load_file(path)
    wanted = eager.state_dict()
    for name in (*description.parameters, *description.buffers):
        torch.testing.assert_close(
            found[name], wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
