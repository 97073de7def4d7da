"""Fixtures of the extension's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch2ort._torch import autograd_functions as private
from torch2ort.pythonop.native import native


@pytest.fixture
def layout_unknown() -> Iterator[None]:
    """Have the extension ask torch for a tensor's holders, as it does where it cannot read the count."""
    assert not native.find_layout((), ())
    yield
    assert native.find_layout(*private.tensors_of_known_memory())


@pytest.fixture(params=["read", "asked"])
def holders_known_by(request: pytest.FixtureRequest) -> str:
    """Both ways in which the extension finds the holders of a tensor."""
    if request.param == "asked":
        request.getfixturevalue("layout_unknown")
    return request.param
