"""Portable exports that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime
import torch
from torch import nn

import torch2ort


class Calls(nn.Module):
    """A function of tensors as a model."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


def export(call: Callable[..., Any], x: torch.Tensor, **arguments: Any) -> torch2ort.ExportedModel:
    return torch2ort.export(Calls(call).eval(), x, portable=True, **arguments)


def in_a_plain_session(exported: torch2ort.ExportedModel, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(exported.proto.SerializeToString())
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, feeds)]
