"""Fused regions without a compiler, for tests of their operators."""

from __future__ import annotations

import json

import pytest

from torch2ort.fusion import compiled_regions
from torch2ort.fusion.region import decode_region


def interpret(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run regions operator by operator in PyTorch's kernels.

    Returns:
        The operators of each region that is requested from now on, equal regions once.
    """
    found: list[list[str]] = []

    def obtained(texts, store):
        for text in texts:
            found.append([json.loads(call)["operator"] for call, *_ in json.loads(text)["calls"]])
        return {text: decode_region(text).run for text in texts}

    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())
    monkeypatch.setattr(compiled_regions, "load_or_compile", obtained)
    return found
