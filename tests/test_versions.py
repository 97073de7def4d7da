"""Messages about untested versions, and about private names that are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch2ort.support.versions import TESTED, Tested, installed, need


def imported_with(change: str, imports: str = "import torch2ort") -> str:
    """Return the errors and warnings of a new process that changes a package and then imports torch2ort."""
    script = f"import warnings\nwarnings.simplefilter('always')\n{change}\n{imports}\n"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    ).stderr


@pytest.mark.parametrize(
    ("version", "held"),
    [
        ("2.10.9", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.3", True),
        ("2.16.0", False),
        ("2.16.0a0+git1", False),
        ("3.0", False),
    ],
)
def test_a_range_holds_its_ends_and_their_patches(version, held):
    assert Tested((2, 11), (2, 15)).holds(version) == held


def test_another_version_is_warned_of_at_import():
    change = (
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '2.16.0' if name == 'torch' else version(name)"
    )
    said = imported_with(change)
    assert said.count("Torch2OrtWarning") == 1
    assert (
        "Torch2OrtWarning: torch 2.16.0 is untested. torch2ort was tested with torch 2.11 "
        "to 2.15. Install one of those: pip install 'torch>=2.11,<2.16'"
    ) in said


def test_two_runtimes_in_one_environment_are_warned_of_at_import():
    change = (
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "both = {'onnxruntime': '1.31.1', 'onnxruntime-training-cpu': '1.19.2'}\n"
        "metadata.version = lambda name: both.get(name) or version(name)"
    )
    said = imported_with(change)
    assert (
        "Torch2OrtWarning: onnxruntime-training-cpu 1.19.2 and onnxruntime 1.31.1 are both installed, "
        "and share one folder: its files may be a mixture. Remove both with pip uninstall "
        "onnxruntime-training-cpu onnxruntime, then install one of them"
    ) in said


def test_a_tested_version_is_not_warned_of():
    assert "Torch2OrtWarning" not in imported_with("")


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        pytest.param(
            "import torch._subclasses.fake_tensor as m\ndel m.unset_fake_temporarily",
            "cannot import name 'unset_fake_temporarily' from 'torch._subclasses.fake_tensor'",
            id="a function",
        ),
        pytest.param(
            "import torch\ndel torch._ops.OpOverload._can_decompose",
            "type 'OpOverload' has no attribute '_can_decompose'",
            id="a method",
        ),
    ],
)
def test_a_private_name_that_is_gone_is_named_once_it_is_read(change, lacks):
    said = imported_with(change, "from torch2ort.exports import export_call")
    (last,) = [line for line in said.splitlines() if line.startswith("ImportError")][-1:]
    assert last.startswith(
        f"ImportError: torch2ort does not work with torch {installed('torch')}, which lacks a private name "
        f"that torch2ort reads ({lacks}"
    )
    assert last.endswith(
        "torch2ort was tested with torch 2.11 to 2.15. Install one of those: pip install 'torch>=2.11,<2.16'"
    )


def test_attributes_of_instances_count_if_the_class_sets_them():
    class Sets:
        declared: int

        def __init__(self):
            self.assigned = 1

    need(Sets, "declared", "assigned", "__init__")
    with pytest.raises(AttributeError) as caught:
        need(Sets, "assigned", "gone")
    assert str(caught.value) == "type 'Sets' has no attribute 'gone'"


@pytest.mark.parametrize("distribution", TESTED)
def test_what_is_installed_here_was_tested(distribution):
    assert TESTED[distribution].holds(installed(distribution))
