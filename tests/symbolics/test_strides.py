"""What a kernel of PyTorch's returned in another order of memory may be viewed as eager views it."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import assert_trains_like_eager


class Inverse(torch.nn.Module):
    """The inverse lies in memory by columns, so that its transpose is viewed without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        matrices = self.layer(x).view(-1, 4, 4) + 3 * torch.eye(4)
        return torch.linalg.inv(matrices).mT.reshape(-1, 16)


def test_a_view_of_a_kernels_transposed_result():
    torch.manual_seed(0)
    batch = (torch.randn(3, 16, requires_grad=True),)
    assert_trains_like_eager(Inverse(), [batch], steps=3, lr=0.001)


class Codes(torch.nn.Module):
    """Channels last by a permutation, which PyTorch's convolution may have given already."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.conv, self._write = torch.nn.Conv2d(3, 4, 1), write

    def forward(self, x):
        hidden = self.conv(x).permute(0, 2, 3, 1).contiguous()
        rows = hidden.view(-1, 4)
        if self._write:
            rows.mul_(2.0)
        return hidden, rows


@pytest.mark.parametrize("write", [False, True])
def test_a_view_of_a_permuted_result_of_a_convolution(write):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert_trains_like_eager(Codes(write), [(images,)], steps=2, lr=0.01)
