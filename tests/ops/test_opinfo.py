"""PyTorch's own samples of its operators are equal to eager PyTorch, or refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops import opinfo, opinfo_refused

PARTS = 16


def _refused(name: str, text: str, way: str) -> bool:
    """Return True if ``text`` is a torch2ort error that is expected of this operator."""
    of_way = (opinfo_refused.OF_EXPORTS,) if way == "export" else ()
    known = (opinfo_refused.EVERYWHERE, *of_way)
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
    unequal = [
        (name, text)
        for name, described in itertools.islice(opinfo.operators(dtype), part, None, PARTS)
        for text in opinfo.outcomes(described, dtype, opinfo.WAYS[way])
        if not _refused(name, text, way)
        and not (dtype == torch.float64 and name in opinfo_refused.OF_EAGER and way == "train")
    ]
    assert unequal == []
