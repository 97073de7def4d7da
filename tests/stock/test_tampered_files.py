"""A file with any attributes is refused by name or runs, at little cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch

import torch2ort
from tests.stock.models import registered
from tests.stock.tampered_files import Into, save, set_attribute
from tests.support.functions import Constants, Square


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A file with three calls of Functions and one of PyTorch's kernels."""
    path = tmp_path_factory.mktemp("mixed") / "model.onnx"
    save(path)
    return path


def outcomes(mixed: Path, kind: str, every: int) -> dict[str, str]:
    """Return the outcome of each ``every``-th tampered file, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stock.tampered_files", kind, str(mixed), str(every)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    found: dict[str, str] = dict(map(json.loads, done.stdout.splitlines()))
    assert done.returncode == 0, (list(found)[-1:], done.stderr[-2000:])
    return found


def failed(found: dict[str, str]) -> dict[str, str]:
    """Return the outcomes other than a refusal by name, a run, or an expected error of a run."""
    return {name: o for name, o in found.items() if o.partition(":")[0] not in ("refused", "stopped", "ran")}


@pytest.mark.parametrize("kind", ["load", "info", "plain"])
def test_a_tampered_file_is_refused_or_runs(mixed, kind):
    found = outcomes(mixed, kind, 59)
    assert failed(found) == {}
    assert len(found) > 75


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["load", "info", "plain"])
def test_every_tampered_file_is_refused_or_runs(mixed, kind):
    assert failed(outcomes(mixed, kind, 1)) == {}


def edited(mixed: Path, folder: Path, edit) -> Path:
    """A copy whose first PythonOp node was edited."""
    model = onnx.load(mixed)
    edit(next(node for node in model.graph.node if node.op_type == "PythonOp"))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


NODE = "PythonOp tests.stock.tampered_files.Into (node 'PythonOp_0'): "
EXPORT = "; export the model again"
HUGE = "[1000000000, 1000000000, 1000000000, 1000000000, 1000000000, 1000000000, 1000000000, 1000000000, ...]"
ATTRIBUTES = [
    ("tensor_reuse_map", [-1, 99], "[-1, 99]", "[-1, 0]"),
    ("tensor_reuse_map", None, "missing", "[-1, 0]"),
    ("bw_tensor_reuse_map", [7], "[7]", "[1]"),
    ("output_tensor_ranks", [10**9] * 50, HUGE, "[2]"),
    ("output_tensor_types", [-1], "[-1]", "[1]"),
    ("input_tensor_types", [], "[]", "[1]"),
    ("input_convention", "dd", "'dd'", "'d'"),
    ("input_requires_grads", [1, 1], "[1, 1]", "[1]"),
    ("safe_run_mode", "x", "'x'", "1"),
    ("input_int_scalars", [5], "[5]", "missing"),
]


@pytest.mark.parametrize(("name", "value", "given", "expected"), ATTRIBUTES)
def test_an_attribute_that_is_not_its_sites_is_named(mixed, tmp_path, name, value, given, expected):
    path = edited(mixed, tmp_path, lambda node: set_attribute(node, name, value))
    with pytest.raises(torch2ort.ModelLoadError) as caught:
        torch2ort.load(path, functions=[Into, Constants, Square])
    assert str(caught.value) == (
        f"{path}: {NODE}its attribute '{name}' is {given}, but its site was exported with {expected}{EXPORT}"
    )


SITES = [
    (
        {"forward_map": [[0, 99]]},
        "'forward_map, to' is [99]; expected positions of tensors, each at most once: [0]",
    ),
    (
        {"backward_map": [[0, -1]]},
        "'backward_map, to' is [-1]; expected positions of tensors, each at most once: [0]",
    ),
    (
        {"mutated": [0, 0]},
        "'mutated' is [0, 0]; expected positions of tensor arguments, each at most once: [0]",
    ),
    (
        {"non_differentiable": [-1]},
        "'non_differentiable' is [-1]; expected tensor outputs, each at most once: [0]",
    ),
    (
        {"tensors": [["float32", 10**9]]},
        "'tensors' holds torch.float32 of rank 1000000000; expected a dtype of ONNX's and "
        "a rank from 0 to 64",
    ),
    (
        {"tensors": [["int64", 2]]},
        "'tensors' says torch.int64 of an output that is argument 0, and 'inputs' says torch.float32",
    ),
    (
        {"needs_input_grad": []},
        "'needs_input_grad' holds 0 entries; expected 1, as there are as many arguments",
    ),
    ({"arguments": [{"device": "nowhere"}]}, None),
    ({"arguments": [{"complex": ["0x0p+0"]}]}, None),
]


@pytest.mark.parametrize(("fields", "reason"), SITES)
def test_a_field_of_a_site_that_cannot_be_is_named(mixed, tmp_path, fields, reason):
    def edit(node):
        (text,) = (a.s for a in node.attribute if a.name == "site")
        set_attribute(node, "site", json.dumps({**json.loads(text), **fields}))

    path = edited(mixed, tmp_path, edit)
    with pytest.raises(torch2ort.ModelLoadError) as caught:
        torch2ort.load(path, functions=[Into, Constants, Square])
    start = f"{path}: PythonOp tests.stock.tampered_files.Into: its attribute 'site' is damaged ("
    assert str(caught.value).startswith(start)
    assert reason is None or str(caught.value) == f"{start}{reason})"


def test_what_was_tampered_with_ran_before(mixed):
    with registered(Into, Constants, Square):
        assert torch2ort.load(mixed)(torch.ones(2, 4)).shape == (2, 4)
