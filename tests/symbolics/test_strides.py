"""What a kernel of PyTorch's returned in another order of memory may be viewed as eager views it."""

from __future__ import annotations

import torch

from tests.comparison import assert_trains_like_eager


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
