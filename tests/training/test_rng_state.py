"""Random numbers that an export or a comparison draws leave all generators unchanged, those of GPUs too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch2ort
from torch2ort import Options


class Reads(torch.autograd.Function):
    """Reads a value, so that it runs on real tensors during the export."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.sum().item() > -1e9 else 3.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(x)


def test_a_gpus_generator_is_put_back_wherever_the_cpus_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[list[int]] = []
    fork = torch.random.fork_rng

    @contextlib.contextmanager
    def noted(devices: Any = None, **settings: Any) -> Iterator[None]:
        forked.append(list(devices))
        with fork(devices=[], **settings):
            yield

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # A torch that is built for CUDA would then query the devices' generators itself.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = torch2ort.ORTModule(Model(), options=Options(verify=True))
    module(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(forked) > 2
    assert forked == [[0, 1]] * len(forked)
