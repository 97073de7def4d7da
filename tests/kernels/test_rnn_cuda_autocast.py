"""A recurrent net on a GPU under autocast is refused by name; the tensors are fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.recurrent import ORIGINALS, fake_call


def called_with(device: str) -> list[object]:
    with FakeTensorMode():
        return [torch.empty(3, 2, 4, device=device), [], [], True]


@pytest.fixture
def autocast() -> Iterator[None]:
    """Set the state of ``torch.autocast("cuda")``, which a PyTorch without CUDA does not enable."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", before)


@pytest.mark.usefixtures("autocast")
def test_on_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        fake_call(torch.lstm, called_with("cuda"), onednn=True)
    assert str(caught.value) == (
        "lstm was called on cuda:0 under torch.autocast, whose types of a recurrent net on a GPU are "
        "untested. Call it in a block `with torch.autocast('cuda', enabled=False):`"
    )


@pytest.mark.usefixtures("autocast")
def test_on_the_cpu_it_is_not() -> None:
    assert fake_call(torch.lstm, called_with("cpu"), onednn=True) in ORIGINALS


def test_without_autocast_it_is_not() -> None:
    assert fake_call(torch.lstm, called_with("cuda"), onednn=True) in ORIGINALS
