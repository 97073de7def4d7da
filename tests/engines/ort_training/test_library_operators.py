"""Operators of libraries on onnxruntime-training: tests/kernels/test_library_operators.py tries them all."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.kernels.test_library_operators import BODIES, Model, NoGradient, assert_steps_alike, run
from tests.support import library_operators as own

pytestmark = pytest.mark.ort_training("it is what is tried")

TRIED = {
    **{name: BODIES[name] for name in ("numpy, and numpy in backward", "several results", "random")},
    "a gradient that is left out": BODIES["a gradient that is left out"],
    "nothing arrives": lambda m, h: NoGradient.apply(own.sine(h * m.scale)) + h,
}


@pytest.mark.parametrize("body", TRIED.values(), ids=TRIED)
def test_it_trains_like_eager(body) -> None:
    model, x = Model(body), torch.randn(3, 4)
    assert_steps_alike(run(torch2ort.ORTModule(copy.deepcopy(model)), x), run(model, x))
