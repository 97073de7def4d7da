"""The examples of the registries print what their docstrings say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def differences(printed):
    """The differences from eager PyTorch that an example prints."""
    return [float(text) for text in re.findall(r"\d\.\de[+-]\d\d", printed)]


def test_custom_exporter(capsys):
    printed = run("custom_exporter.py", capsys)
    assert "before: 3 nodes, 1 calls into Python\n" in printed
    assert "after: 7 nodes, 0 calls into Python\n" in printed
    assert re.search(r"after.*Softplus +\[batch, 16\]", printed, re.DOTALL)
    assert max(differences(printed)) < 1e-5


def test_shape_inferer(capsys):
    printed = run("shape_inferer.py", capsys)
    before, after = printed.split("after: ")
    assert "27 nodes, 3 sizes without a name\n" in before
    assert "29 nodes, 0 sizes without a name\n" in after
    assert "Softmax    [batch,time-3,time-3]\n" in after
    assert max(differences(printed)) < 1e-5


@pytest.mark.filterwarnings("ignore::torch2ort.Torch2OrtWarning")
def test_inplace_map(capsys):
    printed = run("inplace_map.py", capsys)
    before, after = printed.split("after: ")
    assert "two pieces of memory\n" in before
    assert "the same memory\n" in after
    assert "{'tensor_reuse_map': [-1, 0]}\n" in after
    assert "a map that is not true: __main__.Sign: the in-place map says" in after
    assert max(differences(printed)) < 1e-5
