"""Convolutions in groups train like eager, in a kernel that stays within its memory."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_trains_like_eager

nn = torch.nn

# How to make the module, and the shape of its input. onnxruntime-training's gradient of these writes past
# its output.
OVER_ONE_OR_THREE = {
    "depthwise, over one": (lambda: nn.Conv1d(6, 6, 4, groups=6, padding=3), (2, 6, 9)),
    "over one, strided and dilated": (lambda: nn.Conv1d(4, 8, 3, groups=2, stride=2, dilation=2), (1, 4, 19)),
    "over one, same": (lambda: nn.Conv1d(4, 4, 4, groups=2, padding="same"), (2, 4, 9)),
    "over one, an item": (lambda: nn.Conv1d(4, 4, 3, groups=4), (4, 9)),
    "over three": (lambda: nn.Conv3d(4, 4, 2, groups=2), (2, 4, 3, 4, 5)),
    "depthwise, over three": (lambda: nn.Conv3d(3, 6, 2, groups=3, padding=1), (1, 3, 3, 4, 5)),
}
OTHERS = {
    "over two": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    "over two, same": (lambda: nn.Conv2d(4, 4, 4, groups=4, padding="same"), (2, 4, 9, 9)),
    "of no items": (lambda: nn.Conv1d(4, 4, 3, groups=2), (0, 4, 9)),
    "transposed, over one": (lambda: nn.ConvTranspose1d(4, 4, 3, groups=2), (2, 4, 9)),
    "transposed, over three": (lambda: nn.ConvTranspose3d(4, 4, 3, groups=2), (1, 4, 4, 4, 4)),
    "ungrouped, over one": (lambda: nn.Conv1d(4, 4, 3, stride=2, dilation=2), (2, 4, 19)),
    "ungrouped, over three": (lambda: nn.Conv3d(4, 4, 2, stride=2, dilation=2), (2, 4, 9, 9, 9)),
}
ALL = {**OVER_ONE_OR_THREE, **OTHERS}


class Convolution(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.module(x * self.scale).mean((-1, -2))


def make(case):
    module, shape = case
    torch.manual_seed(0)
    return Convolution(module()), torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_a_convolution_trains_like_eager(case):
    model, x = make(case)
    assert_trains_like_eager(model, [(x,)], steps=2)


@pytest.mark.parametrize("case", OVER_ONE_OR_THREE.values(), ids=OVER_ONE_OR_THREE.keys())
def test_no_gradient_is_left_to_the_kernel_that_writes_past_its_output(case):
    nodes = torch2ort.export(*make(case), training=True).proto.graph.node
    assert "Conv" not in {node.op_type for node in nodes}
