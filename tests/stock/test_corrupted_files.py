"""A damaged file is an error that names it; one that another tool has edited is not damaged."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort.runtime._ort_private import version


@pytest.fixture
def saved_in_two(tmp_path, monkeypatch) -> Path:
    """A model whose weights are in a file of their own, as past 2 GiB."""
    torch.manual_seed(0)
    exported = torch2ort.export(torch.nn.Linear(64, 64).eval(), torch.ones(2, 64))
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 100)
    exported.save(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


FLIP = """
import faulthandler, random, sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch2ort
from tests.support.functions import Square

faulthandler.enable()
faulthandler.dump_traceback_later(100, exit=True)
torch2ort.register_function(Square)
path, kind, seed, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
intact = path.read_bytes()
damaged = path.with_name("damaged.onnx")
draw = random.Random(seed)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
options.register_custom_ops_library(torch2ort.custom_ops_library_path())


def plain():
    session = onnxruntime.InferenceSession(str(damaged), options)
    session.run(None, {session.get_inputs()[0].name: np.ones((2, 4), np.float32)})


def loaded():
    torch2ort.load(damaged)(torch.ones(2, 4))


outcomes = {"refused": 0, "ran": 0}
for _ in range(count):
    content = bytearray(intact)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    damaged.write_bytes(content)
    try:
        {"plain": plain, "loaded": loaded}[kind]()
        outcomes["ran"] += 1
    except Exception:
        outcomes["refused"] += 1
print(outcomes, flush=True)
"""


def flip(saved: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """A thousand files with one bit changed each, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FLIP), str(saved), kind, "1", "1000"],
        capture_output=True,
        text=True,
        timeout=115,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_every_flip_of_a_bit_is_an_error_of_load(saved):
    # Before the error, onnxruntime reports its next attempt.
    assert flip(saved, "loaded").stdout.splitlines()[-1:] == ["{'refused': 1000, 'ran': 0}"]


@pytest.mark.skipif(
    version() < (1, 20),
    reason="onnxruntime-training 1.19.2 aborts on some damaged files before it asks torch2ort; load does not",
)
def test_flips_end_in_an_error_or_a_run_of_a_plain_session(saved):
    assert "'refused'" in flip(saved, "plain").stdout.splitlines()[-1]


def rewritten(saved: Path, edit: Callable[[onnx.ModelProto], object]) -> Path:
    """Edit the file and write it as another tool does."""
    model = onnx.load(saved)
    edit(model)
    onnx.save(model, saved)
    return saved


def test_a_file_that_a_tool_has_edited_loads(saved):
    def negate(model: onnx.ModelProto) -> None:
        (weight,) = (t for t in model.graph.initializer if t.name == "linear.weight")
        weight.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weight), weight.name))

    x = torch.randn(2, 4)
    before = torch2ort.load(saved, functions=[Square])(x)
    after = torch2ort.load(rewritten(saved, negate), functions=[Square])(x)
    assert not torch.equal(before, after)


def test_a_damaged_file_is_named(saved):
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 1
    saved.write_bytes(content)
    with pytest.raises(torch2ort.ModelLoadError) as caught:
        torch2ort.load(saved, functions=[Square])
    assert str(caught.value) == (
        f"{saved}: it is damaged, or not an ONNX model: its checksum differs from the one that was saved. "
        f"Save the model again"
    )


def test_a_truncated_file_is_an_error_that_names_it(saved, tmp_path):
    content = saved.read_bytes()
    short = tmp_path / "short.onnx"
    for size in (0, 1, len(content) // 2, len(content) - 1):
        short.write_bytes(content[:size])
        with pytest.raises(torch2ort.ModelLoadError, match=str(short)):
            torch2ort.load(short, functions=[Square])
    shutil.copy(saved, short)
    assert torch2ort.load(short, functions=[Square])(torch.ones(2, 4)).shape == (2, 4)


def test_weights_beside_the_file_are_loaded(saved_in_two):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).eval()
    x = torch.randn(2, 64)
    assert sorted(p.name for p in saved_in_two.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    torch.testing.assert_close(torch2ort.load(saved_in_two)(x), model(x))


def test_damaged_weights_beside_the_file_are_an_error(saved_in_two):
    data = saved_in_two.with_name("model.onnx.data")
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(torch2ort.ModelLoadError) as caught:
        torch2ort.load(saved_in_two)
    assert str(caught.value) == (
        f"{saved_in_two}: its data in model.onnx.data is damaged: the checksum differs from the one that was "
        f"saved. Save the model again"
    )


def test_missing_weights_beside_the_file_are_an_error(saved_in_two):
    saved_in_two.with_name("model.onnx.data").unlink()
    with pytest.raises(torch2ort.ModelLoadError, match=str(saved_in_two)):
        torch2ort.load(saved_in_two)
