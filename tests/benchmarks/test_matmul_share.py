"""What `make bench` says of matrix products."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch2ort

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _products

    return _products


def test_products_and_the_rest_make_the_ratio(products, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "eager_library", lambda: "MKL 2024.2")
    monkeypatch.setattr(products, "ort_library", lambda: "MLAS of ONNX Runtime 1.31.1")
    assert products.said_of_products(ratio=0.6, eager=0.8, ort=0.7) == (
        "  matrix products are 80% of eager's step (MKL 2024.2) and 70% of torch2ort's (MLAS of ONNX Runtime "
        "1.31.1): torch2ort takes 52% of eager's time for them, and 90% for the rest"
    )


def test_a_net_of_products_is_mostly_products(products) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3)))
    x = torch.randn(256, 256)
    module = torch2ort.ORTModule(model)

    def step(net: torch.nn.Module) -> None:
        net(x).sum().backward()

    for share in (
        products.share_in_eager(lambda: step(model)),
        products.share_on_ort(module, lambda: step(module)),
    ):
        assert 0.2 < share < 1


def test_the_gate_keeps_nothing_of_what_is_said_of_the_machine(products) -> None:
    lines = [products.said_of_products(0.61, 0.81, 0.71), "on AMD EPYC, 2 cores, with torch 1.31.10"]
    gate = [sys.executable, BENCHMARKS / "gate.py"]
    done = subprocess.run(gate, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.stderr == "no ratio was printed; pipe what the benchmarks print into the gate\n"
