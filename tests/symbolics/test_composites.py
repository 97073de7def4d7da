"""Composite operators are found and overridden as by torch.export, in a tenth of its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._export import utils
from torch.export import exported_program

from torch2ort._torch import decompositions as private

LIBRARY = torch.library.Library("torch2ort_tests_composites", "FRAGMENT")


@pytest.fixture(scope="module")
def composite() -> Iterator[torch._ops.OpOverload]:
    """A composite operator that is registered while the process runs."""
    LIBRARY.define("doubled(Tensor x) -> Tensor")
    LIBRARY.impl("doubled", lambda x: x + x, "CompositeImplicitAutograd")
    yield torch.ops.torch2ort_tests_composites.doubled.default
    LIBRARY._destroy()


def test_the_same_composites_are_found(composite) -> None:
    assert private._composites() == utils._collect_all_valid_cia_ops() >= {composite}


def keys_of_kernels(override, operators) -> tuple[dict, dict]:
    """The kernel keys of each operator while it is overridden, and its kernels afterwards."""

    def decomposition(x):
        return x

    with override(dict.fromkeys(operators, decomposition)):
        keys = {operator: set(operator.py_kernels) for operator in operators}
        implicit = torch._C.DispatchKey.CompositeImplicitAutograd
        assert all(operator.py_kernels[implicit] is decomposition for operator in operators)
    return keys, {operator: dict(operator.py_kernels) for operator in operators}


def test_the_same_kernels_are_set_and_put_back(composite) -> None:
    operators = [*utils._collect_all_valid_cia_ops()]
    before = {operator: dict(operator.py_kernels) for operator in operators}
    wanted = keys_of_kernels(exported_program._override_composite_implicit_decomp, operators)
    assert wanted[1] == before
    assert keys_of_kernels(private._overridden, operators) == wanted


def test_torch_export_is_as_it_was_when_an_export_ends(monkeypatch) -> None:
    @contextmanager
    def unexpected(composites):
        raise AssertionError("torch.export's own was not put back")
        yield

    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", unexpected)
    with private._composites_found_once():
        assert exported_program._override_composite_implicit_decomp is private._overridden
    assert exported_program._override_composite_implicit_decomp is unexpected
