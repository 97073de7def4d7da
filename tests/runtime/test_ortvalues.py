"""PyTorch's tensors as onnxruntime's values."""

from __future__ import annotations

import torch

from torch2ort.runtime.ortvalues import plain, to_tensor, to_value


def test_a_value_keeps_the_memory_of_a_tensor_that_gets_another() -> None:
    tensor = torch.randn(100_000)
    expected, value = tensor.clone(), to_value(plain(tensor))
    tensor.data = torch.zeros(100_000)
    assert torch.equal(to_tensor(value), expected)
