"""Roots and logarithms equal eager PyTorch's at both ends of float32, with all kernels of the runtime."""

import pytest
import torch

import torch2ort
from tests.support.sweeps import sample_cases
from torch2ort.runtime.workarounds import sqrt_log

ENDS = torch.tensor([torch.inf, 3e38, 4.0, 1.0, 1e-38, 1e-39, 1e-45, 0.0, -1.0, torch.nan]).repeat(4)
CALLS = {
    "sqrt": torch.sqrt,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "pow 0.5": lambda x: x**0.5,
    "pow of a tensor": lambda x: x ** (torch.ones_like(x[0]) / 2),
    "a number to its own power": lambda x: x.clamp(max=2.0) ** x.clamp(max=2.0),
    "pow 2": lambda x: (x / 2) ** 2,
    "float64": lambda x: x.double().sqrt().log(),
}


class Called(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize("kernels", ["its own", "those of an estimate"])
@pytest.mark.parametrize("call", sample_cases(CALLS.values(), 2), ids=CALLS)
def test_they_are_eagers(call, kernels, monkeypatch):
    if kernels == "those of an estimate":
        monkeypatch.setattr(sqrt_log, "computes_whole_range", lambda: False)
    model = Called(call)
    with torch.no_grad():
        found = torch2ort.ORTModule(model)(ENDS)
    torch.testing.assert_close(found, model(ENDS), rtol=1e-6, atol=0, equal_nan=True)
