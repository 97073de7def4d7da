"""``python -m torch2ort info`` prints a file's inputs, outputs and calls, and needs nothing but the file."""

from __future__ import annotations

import subprocess
import sys

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import torch2ort
from tests.support.functions import Affine, Constants
from torch2ort.__main__ import main


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x, count):
        scaled = Affine.apply(x, self.scale)
        return {"y": Constants.apply(scaled, *Constants.EXPECTED), "next": count + 1}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.onnx"
    batch = torch.export.Dim("batch")
    sample = (torch.randn(3, 6), torch.tensor(4))
    torch2ort.export(Model().eval(), sample, dynamic_shapes=({0: batch}, None)).save(path)
    return path


def test_it_lists_inputs_outputs_and_calls_with_their_arguments(saved, capsys):
    assert main(["info", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{saved}: saved by torch2ort in format 1, inference mode, opset 18, IR version 10, "
    )
    first = Model.forward.__code__.co_firstlineno + 1
    assert lines[1:] == [
        "inputs:",
        "  x: float32 [batch, 6]",
        "  count: int64 []",
        "outputs:",
        "  y: float32 [batch, 6]",
        "  next: int64 []",
        "PythonOps: 2",
        "  PythonOp_0: tests.support.functions.Affine",
        f"    line tests/_commands/test_info.py:{first}",
        "    argument 0: x: float32 [batch, 6]",
        "    argument 1: scale: float32 [6]",
        "    output getitem: float32 [batch, 6]",
        "  PythonOp_1: tests.support.functions.Constants",
        f"    line tests/_commands/test_info.py:{first + 1}",
        "    argument 0: getitem: float32 [batch, 6]",
        "    argument 1: True",
        "    argument 2: 3",
        "    argument 3: 0.1",
        "    argument 4: (1, 2)",
        "    argument 5: (0.1, 0.2)",
        "    argument 6: (True, False)",
        "    argument 7: 'mode'",
        "    argument 8: None",
        "    argument 9: [1, 'a']",
        "    argument 10: {'k': 1.5}",
        "    argument 11: torch.float32",
        "    output y: float32 [batch, 6]",
        "costs (batch = 1):",
        "  operator                              nodes      FLOPs      bytes",
        "  Add                                       1          1         24",
        "  com.microsoft::PythonOp                   2          ?        120",
        "  Constant                                  1          0          8",
        "  total                                     4          1        152",
    ]


class Marked(torch.nn.Module):
    """An operator that ONNX lacks, and one that a torch2ort session computes differently."""

    def forward(self, x):
        return torch.linalg.cholesky(x), x.amax(0)


def test_it_lists_kernels_of_pytorch_and_counts_marks(tmp_path, capsys):
    torch2ort.export(Marked().eval(), torch.eye(3)).save(tmp_path / "marked.onnx")
    assert main(["info", str(tmp_path / "marked.onnx")]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = Marked.forward.__code__.co_firstlineno + 1
    start = lines.index("PythonOps: 0")
    assert lines[start + 1 : start + 4] == [
        "kernels of PyTorch: 1",
        f"  PythonOp_0: torch.ops.aten.linalg_cholesky (tests/_commands/test_info.py:{line})",
        "marks: 1 node that a session of torch2ort runs as eager PyTorch does",
    ]


class Scaled(torch.nn.Module):
    def forward(self, x):
        return Scale.apply(x, 0.1)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor


def test_it_lists_portable_functions_with_their_arguments(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    torch2ort.export(Scaled().eval(), torch.randn(3, 6), portable=True).save(path)
    assert main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("PythonOps: 0")
    assert lines[start : start + 7] == [
        "PythonOps: 0",
        "portable Functions: 1",
        f"  Scale_0: {__name__}.Scale, as {__name__}::Scale",
        f"    line tests/_commands/test_info.py:{Scaled.forward.__code__.co_firstlineno + 1}",
        "    argument 0: x: float32 [3, 6]",
        "    argument 1: 0.1",
        "    output output: float32 [3, 6]",
    ]
    assert "  Mul                                       1         18        148" in lines


def test_it_ends_quietly_where_nobody_reads_on(saved):
    command = [sys.executable, "-m", "torch2ort", "info", str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_sizes_that_vary_are_given_for_the_costs(saved, capsys):
    assert main(["info", str(saved), "--size", "batch=100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "costs (batch = 100):" in lines
    assert "  com.microsoft::PythonOp                   2          ?     9.62 k" in lines


def test_a_size_that_is_none_is_an_error(saved, capsys):
    assert main(["info", str(saved), "--size", "batch"]) == 1
    assert capsys.readouterr().err == "--size batch: expected NAME=N, as in --size batch=8\n"


def test_it_works_where_no_onnxruntime_and_no_function_is(saved):
    code = (
        "import sys; sys.modules['onnxruntime'] = None; import torch2ort.__main__ as m; m.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "info", str(saved)], capture_output=True, text=True, timeout=100
    )
    assert "PythonOp_1: tests.support.functions.Constants" in done.stdout, done.stderr


def test_a_file_of_another_producer_is_described_too(tmp_path, capsys):
    x, y = (helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "graph", [x], [y])
    path = tmp_path / "foreign.onnx"
    onnx.save(
        helper.make_model(graph, producer_name="somebody", opset_imports=[helper.make_opsetid("", 18)]), path
    )
    assert main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{path}: an ONNX model of somebody, not saved by torch2ort, opset 18, IR version "
    )
    assert lines[1:] == [
        "inputs:",
        "  x: float64 of unknown rank",
        "outputs:",
        "  y: float64 of unknown rank",
        "PythonOps: 0",
        "costs:",
        "  operator                              nodes      FLOPs      bytes",
        "  Neg                                       1          ?          ?",
        "  total                                     1          ?          ?",
    ]


def test_what_cannot_be_read_is_said_on_stderr(saved, tmp_path, capsys):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(saved.read_bytes()[:100])
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(saved.read_bytes().replace(b'"tensor"', b'"t nsor"'))
    missing = tmp_path / "missing.onnx"
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    for path, reason in (
        (broken, "not a readable ONNX model"),
        (damaged, "PythonOp tests.support.functions.Affine: its attribute 'site' is damaged"),
        (missing, "there is no such file"),
        (empty, "it contains no graph: the file is empty, truncated or not an ONNX model"),
    ):
        assert main(["info", str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"{path}: {reason}")
