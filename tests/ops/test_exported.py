"""Operators whose exported files were wrong, or refused, for some of their arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.unary_op_model import Applied, Operator

# Functions of x, a tensor of shape (3, 6, 8).
CASES: dict[str, Operator] = {
    **{
        f"interpolate, {mode} with antialias, {said}, corners {corners}": (
            lambda x, mode=mode, size=size, corners=corners: F.interpolate(
                x[None], mode=mode, antialias=True, align_corners=corners, **size
            )
        )
        for mode in ("bilinear", "bicubic")
        for said, size in {
            "smaller": {"size": (4, 5)},
            "by a factor": {"scale_factor": 0.7},
            "by two factors": {"scale_factor": (0.3, 1.2)},
            "larger": {"size": (11, 17)},
        }.items()
        for corners in (False, True)
    },
    "squeeze of another size": lambda x: x.squeeze(1) * 2,
    "squeeze of another size, from the end": lambda x: x.squeeze(-1) * 2,
    "norm, every axis kept": lambda x: torch.linalg.norm(x[0, 0], 2, keepdim=True),
    "vector_norm, every axis kept": lambda x: torch.linalg.vector_norm(x, 3, keepdim=True),
    "erfcx": lambda x: torch.special.erfcx(x * 9),
    "nll_loss of one item, weighted": lambda x: F.nll_loss(
        x[0, 0], (x.sum() * 0).long() + 1, weight=torch.arange(1.0, 9), reduction="none"
    ),
    "nonzero of a number": lambda x: x.sum().nonzero(),
    "argwhere of a number": lambda x: x.sum().argwhere(),
    "take of a number": lambda x: x.sum().take((x.sum() * 0).long()),
    "gather of nothing": lambda x: x[0, 0].gather(0, torch.zeros(2, 0, dtype=torch.int64)),
    "pixel_unshuffle of nothing": lambda x: F.pixel_unshuffle(x[:0], 1),
    "unfold of nothing": lambda x: F.unfold(x[:0].reshape(0, 1, 6, 8), 2),
    "group_norm of nothing": lambda x: F.group_norm(x[:0], 2),
    "pad, cut off first": lambda x: F.pad(x[None], (-8, 9, 0, 0), mode="replicate"),
    "conv3d of one volume": lambda x: F.conv3d(x.reshape(1, 3, 6, 8), torch.ones(2, 1, 3, 3, 2)),
    "conv_transpose2d, padded beyond its strides": lambda x: F.conv_transpose2d(
        x.reshape(1, 2, 9, 8), torch.ones(2, 2, 3, 3), stride=2, output_padding=2, dilation=3
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_operator_gives_eagers_result(name: str) -> None:
    model = Applied({name: CASES[name]}).eval()
    x = torch.linspace(-2, 2, 144).cos().reshape(3, 6, 8)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


class Counts(torch.nn.Module):
    def forward(self, n: int) -> int:
        return n * 2


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(torch2ort.ExportError) as refusal:
        torch2ort.export(Counts(), (3,))
    assert str(refusal.value) == (
        "Counts: forward takes no tensor and makes none, so there is nothing to export. Call the model itself"
    )
