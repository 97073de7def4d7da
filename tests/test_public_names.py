"""The public names of the package."""

from __future__ import annotations

from importlib import metadata

import pytest

import torch2ort
from torch2ort import errors

EVERY_ERROR = [name for name, value in vars(errors).items() if isinstance(value, type)]


@pytest.mark.parametrize("name", EVERY_ERROR)
def test_every_error_is_a_name_of_the_package(name):
    assert name in torch2ort.__all__
    assert getattr(torch2ort, name) is getattr(errors, name)


@pytest.mark.parametrize("name", ["artifacts", "export_training", "hooks", "optim", "trainer"])
def test_the_package_lists_what_it_has(name):
    assert name in dir(torch2ort)
    assert getattr(torch2ort, name) is not None


def test_the_package_has_its_version():
    assert torch2ort.__version__ == metadata.version("torch2ort")
