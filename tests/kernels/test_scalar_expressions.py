"""Numbers that Python code computes from values in tensors."""

from __future__ import annotations

import json

import pytest
import torch

from torch2ort.errors import ModelLoadError
from torch2ort.kernels.scalar_expressions import computed_number

NUMBERS = [torch.tensor(3), torch.tensor([0.5])]
FIRST, SECOND = {"number": 0}, {"number": 1}


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (["operator.truediv", 1, SECOND], 2.0),
        (["operator.floordiv", ["operator.mul", FIRST, 2**80], 2**80], 3),
        (["operator.gt", FIRST, SECOND], True),
        (["operator.pow", FIRST, 39], 3**39),
    ],
)
def test_a_formula_gives_pythons_number(formula, expected):
    kind = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(expected)]
    made = computed_number(NUMBERS, kind, json.dumps(formula))
    assert (made.item(), made.dtype, made.shape) == (expected, kind, torch.Size())


@pytest.mark.parametrize(
    "formula",
    ["", "[]", '["os.system", "ls"]', '["operator.add", {"tensor": 0}, 1]', '["operator.neg", "a"]'],
)
def test_another_text_is_no_formula(formula):
    with pytest.raises(ModelLoadError, match=r"^not a formula of numbers: "):
        computed_number(NUMBERS, torch.int64, formula)


def test_a_number_outside_of_a_tensors_raises():
    with pytest.raises(
        OverflowError, match=r"^a number that the model computes from one that it reads out of "
    ):
        computed_number(NUMBERS, torch.int64, json.dumps(["operator.pow", FIRST, 40]))
