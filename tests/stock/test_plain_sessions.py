"""A saved file in a plain onnxruntime.InferenceSession gives the model's results in eager PyTorch."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import torch2ort
from tests.stock.models import (
    Chain,
    graph_model,
    plain_options,
    plain_session,
    python_op,
    registered,
    renamed,
    run,
    value,
)
from tests.support.functions import Affine, Constants, Numpy, Square, TwoOutputs


class Model(torch.nn.Module):
    """Functions between layers with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.scale = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = Square.apply(torch.relu(self.linear(x)))
        doubled, summed = TwoOutputs.apply(x)
        x = Constants.apply(Affine.apply(doubled, self.scale), *Constants.EXPECTED)
        return Numpy.apply(x) + summed


FUNCTIONS = (Square, TwoOutputs, Constants, Affine, Numpy)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    model = Model().eval()
    path = tmp_path / "model.onnx"
    batch = torch.export.Dim("batch")
    torch2ort.export(model, torch.randn(3, 6), dynamic_shapes=({0: batch},)).save(path)
    return model, path


def test_a_saved_file_gives_eager_results_in_several_sizes(saved):
    model, path = saved
    with registered(*FUNCTIONS):
        session = plain_session(str(path))
    for batch in (3, 1, 8):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(run(session, x)[0], model(x).detach())


def test_functions_run_without_recording_gradients():
    modes = []

    class Modes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            modes.append(torch.is_grad_enabled())
            return x * 2

    exported = torch2ort.export(Chain(Modes.apply).eval(), torch.ones(3))
    with registered(Modes):
        session = plain_session(exported.proto)
    modes.clear()
    with torch.enable_grad():
        run(session, torch.ones(3))
        assert torch.is_grad_enabled()
    assert modes == [False]


ELEMENT_TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_every_element_type_arrives_and_leaves_as_it_is(dtype):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.dtype is dtype
            return x.flip(0)

    x = torch.tensor([0, 1, 2, 0, 5]).to(dtype)
    exported = torch2ort.export(Chain(Same.apply).eval(), x)
    with registered(Same):
        session = plain_session(exported.proto)
    assert torch.equal(run(session, x)[0], x.flip(0))


class Mixed(torch.autograd.Function):
    """Output types that do not follow from an input."""

    @staticmethod
    def forward(ctx, x, index, mask):
        return mask, x[index], (x > 0), index.sum().float()


def test_inputs_and_outputs_of_several_types_and_ranks_go_together():
    tensors = torch.randn(4, 2), torch.tensor([2, 0]), torch.tensor([True, False, True])
    exported = torch2ort.export(Chain(Mixed.apply).eval(), tensors)
    with registered(Mixed):
        session = plain_session(exported.proto)
    for actual, expected in zip(run(session, *tensors), Mixed.apply(*tensors), strict=True):
        torch.testing.assert_close(actual, expected)


def test_tensors_without_elements_and_without_dimensions_pass():
    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scalar):
            return x[:0], scalar * 3

    tensors = torch.randn(4, 2), torch.tensor(2.0)
    exported = torch2ort.export(Chain(Empty.apply).eval(), tensors)
    with registered(Empty):
        empty, tripled = run(plain_session(exported.proto), *tensors)
    assert empty.shape == (0, 2)
    assert tripled == 6.0


def branches() -> onnx.ModelProto:
    """``Square(x)`` if the condition holds, else ``-x``."""
    node = python_op(Square, torch.ones(3))
    taken = helper.make_graph([renamed(node, ["x"], ["c", "t"], "inside")], "then", [], [value("t")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [value("e")])
    choice = helper.make_node("If", ["condition"], ["y"], then_branch=taken, else_branch=other)
    return graph_model(
        [choice], [value("condition", TensorProto.BOOL, []), value("x", shape=["n"])], [value("y")]
    )


def test_a_function_runs_in_a_branch():
    with registered(Square):
        session = plain_session(branches())
    x = torch.tensor([1.0, 2.0, -3.0])
    torch.testing.assert_close(run(session, torch.tensor(True), x)[0], x * x)
    torch.testing.assert_close(run(session, torch.tensor(False), x)[0], -x)


def test_a_function_runs_in_a_loop():
    node = python_op(Square, torch.ones(3))
    body = helper.make_graph(
        [
            renamed(node, ["state"], ["c", "next"], "inside"),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("state", shape=["n"])],
        [value("on", TensorProto.BOOL, []), value("next", shape=["n"])],
    )
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)
    model = graph_model(
        [loop], [value("trips", TensorProto.INT64, []), value("x", shape=["n"])], [value("y")]
    )
    with registered(Square):
        session = plain_session(model)
    x = torch.tensor([0.5, 1.5])
    torch.testing.assert_close(run(session, torch.tensor(3), x)[0], x**8)


def test_nodes_that_nobody_orders_run_side_by_side():
    node = python_op(Square, torch.ones(3))
    nodes = [renamed(node, ["x"], [f"c{i}", f"y{i}"], f"node{i}") for i in range(4)]
    model = graph_model(
        [*nodes, helper.make_node("Sum", [f"y{i}" for i in range(4)], ["y"])],
        [value("x", shape=["n"])],
        [value("y")],
    )
    with registered(Square):
        session = plain_session(
            model, execution_mode=onnxruntime.ExecutionMode.ORT_PARALLEL, inter_op_num_threads=3
        )
    x = torch.randn(100)
    for _ in range(50):
        torch.testing.assert_close(run(session, x)[0], 4 * x * x)


def test_threads_share_sessions_and_each_gets_its_own_result(saved):
    model, path = saved
    with registered(*FUNCTIONS):
        sessions = [plain_session(str(path)) for _ in range(2)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(30):
            x = torch.randn(1 + seed, 6, generator=generator)
            y = run(sessions[i % 2], x)[0]
            if not torch.allclose(y, model(x), rtol=1e-4, atol=1e-5):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_sessions_are_released_in_any_order(saved, order):
    model, path = saved
    with registered(*FUNCTIONS):
        sessions = {i: plain_session(str(path)) for i in range(3)}
    x = torch.randn(2, 6)
    for i in order:
        del sessions[i]
        gc.collect()
        for session in sessions.values():
            torch.testing.assert_close(run(session, x)[0], model(x).detach())


def test_the_library_can_be_registered_twice_with_the_same_options(saved):
    model, path = saved
    options = plain_options()
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    with registered(*FUNCTIONS):
        sessions = [onnxruntime.InferenceSession(str(path), options) for _ in range(2)]
    x = torch.randn(2, 6)
    for session in sessions:
        torch.testing.assert_close(run(session, x)[0], model(x).detach())


def test_operators_of_onnxruntime_in_the_same_domain_still_work():
    node = python_op(Square, torch.ones(3))
    gelu = helper.make_node("Gelu", ["y"], ["z"], domain="com.microsoft")
    model = graph_model(
        [renamed(node, ["x"], ["c", "y"], "a"), gelu], [value("x", shape=["n"])], [value("z")]
    )
    with registered(Square):
        session = plain_session(model)
    x = torch.randn(20)
    torch.testing.assert_close(run(session, x)[0], torch.nn.functional.gelu(x * x))


def test_a_session_outlives_the_registration_and_a_file_finds_what_is_registered_later(saved):
    model, path = saved
    x = torch.randn(2, 6)
    with registered(*FUNCTIONS):
        session = plain_session(str(path))
    torch.testing.assert_close(run(session, x)[0], model(x).detach())
    with pytest.raises(Exception, match="FunctionNotFoundError"):
        plain_session(str(path))


def test_an_exception_of_a_function_is_named_in_the_message():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if type(x) is torch.Tensor and x.sum() > 100:
                raise ValueError("too much")
            return x * 1

    exported = torch2ort.export(Chain(Fails.apply).eval(), torch.ones(3))
    with registered(Fails):
        session = plain_session(exported.proto)
    run(session, torch.ones(3))
    name = f"{Fails.__module__}.{Fails.__qualname__}"
    with pytest.raises(Exception, match="PythonOp_0") as caught:
        run(session, torch.full((3,), 1e3))
    assert str(caught.value).endswith(f"PythonOp {name} (node 'PythonOp_0'): ValueError: too much")
    np.testing.assert_array_equal(run(session, torch.ones(3))[0], np.ones(3))


EXIT = """
import sys, threading
import numpy as np, onnxruntime, torch2ort
from tests.support.functions import Affine, Constants, Numpy, Square, TwoOutputs

for function in (Affine, Constants, Numpy, Square, TwoOutputs):
    torch2ort.register_function(function)
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(torch2ort.custom_ops_library_path())
session = onnxruntime.InferenceSession(sys.argv[1], options)
x = {session.get_inputs()[0].name: np.ones((2, 6), np.float32)}
values = [onnxruntime.OrtValue.ortvalue_from_numpy(session.run(None, x)[0])]
onnxruntime.kept = session, values            # alive until the modules themselves go
loaded = torch2ort.load(sys.argv[1])
onnxruntime.also_kept = loaded.session(), loaded
def work():
    onnxruntime.from_thread = torch2ort.load(sys.argv[1]).session()
    onnxruntime.from_thread.run(None, x)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("done", flush=True)
"""


def test_a_process_exits_cleanly_with_sessions_alive(saved):
    _, path = saved
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), str(path)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "done\n"
    assert done.returncode == 0, done.stderr
