"""PyTorch's own samples of its operators are equal to eager, or refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops import opinfo, opinfo_refused
from tests.support import engine

PARTS = 16


def _refused(name: str, text: str, way: str) -> bool:
    """Whether ``text`` is an error of torch2ort's that this operator may end in."""
    of_engine = opinfo_refused.OF_JOINT_ENGINE if engine.trains_jointly() else opinfo_refused.OF_ORT_TRAINING
    known = (opinfo_refused.EVERYWHERE, opinfo_refused.OF_EXPORTS if way == "export" else of_engine)
    by_name = text.startswith(("ExportError: ", "UnsupportedOperatorError: "))
    return by_name and any(
        phrase in text and name in names for words in known for phrase, names in words.items()
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", opinfo.TOLERANCES, ids=str)
@pytest.mark.parametrize("way", opinfo.WAYS)
def test_operators_give_what_they_give_in_eager(way: str, dtype: torch.dtype, part: int) -> None:
    if way == "train" and dtype in opinfo.HALF and not engine.trains_jointly():
        pytest.skip("the joint engine alone trains in half precision")
    unequal = [
        (name, text)
        for name, described in itertools.islice(opinfo.operators(dtype), part, None, PARTS)
        for text in opinfo.outcomes(described, dtype, opinfo.WAYS[way])
        if not _refused(name, text, way)
        and not (dtype == torch.float64 and name in opinfo_refused.OF_EAGER and way == "train")
    ]
    assert unequal == []
