"""options={"keep_functions": True}: Functions stay calls of their own code, forward and backward."""

from __future__ import annotations

import ctypes
from pathlib import Path

import onnx
import pytest
import torch

from tests.support.comparison import assert_same
from tests.support.functions import Constants, Numpy, Square, TwoOutputs
from torch2ort.errors import EngineError, OptionError

# dynamo reads no attribute of a Function.
CONSTANTS = Constants.EXPECTED


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def kept(function, **settings):
    return torch.compile(
        function, backend="torch2ort", fullgraph=True, options={"keep_functions": True, **settings}
    )


def results(function, *arguments):
    arguments = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    output = function(*arguments)
    if output.requires_grad:
        output.square().sum().backward()
    return output, [a.grad for a in arguments]


def assert_like_eager(function, *arguments, **settings) -> None:
    expected = results(function, *arguments)
    faster = kept(function, **settings)
    for _ in range(2):
        assert_same(results(faster, *arguments), expected, "output and gradients")


class Dirty(torch.autograd.Function):
    """Writes to its argument; its backward is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Nothing(torch.autograd.Function):
    """Returns no gradient for its second argument."""

    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad * 1, None


def tracked(*sizes):
    return torch.randn(sizes, requires_grad=True)


def test_a_function_is_one_node_of_its_own(tmp_path: Path) -> None:
    assert_like_eager(lambda x: Square.apply(x * 2) + 1, tracked(3), save_onnx_dir=tmp_path)
    graph = onnx.load(next(tmp_path.glob("*compiled_forward_exported.onnx"))).graph
    assert {node.op_type for node in graph.node} - {"Constant"} == {"Add", "Mul", "PythonOp"}
    graph = onnx.load(next(tmp_path.glob("*compiled_backward_exported.onnx"))).graph
    assert {node.op_type for node in graph.node} - {"Constant"} == {"Mul", "PythonOpGrad"}


def test_numpy_runs_in_forward_and_backward() -> None:
    assert_like_eager(lambda x: Numpy.apply(x * 2) + x, tracked(3, 2))


class Native(torch.autograd.Function):
    """Its body is machine code, which reads numbers at their addresses."""

    @staticmethod
    def forward(ctx, x):
        made = torch.empty_like(x)
        ctypes.memmove(made.data_ptr(), x.data_ptr(), x.nbytes)
        return made

    @staticmethod
    def backward(ctx, grad):
        return Native.forward(ctx, grad * 3)


def test_machine_code_runs_in_forward_and_backward() -> None:
    assert_like_eager(lambda x: Native.apply(x * 2) + x, tracked(3, 2))


def test_constants_keep_their_types() -> None:
    assert_like_eager(lambda x: Constants.apply(x, *CONSTANTS).sum(), tracked(3))


def test_functions_behind_each_other_and_of_several_outputs() -> None:
    assert_like_eager(lambda x: sum(TwoOutputs.apply(Square.apply(Numpy.apply(x)))), tracked(3))


def test_functions_with_operators_between_them() -> None:
    assert_like_eager(lambda x: Square.apply(Numpy.apply(x).cumsum(0)).cumsum(0), tracked(3))


def test_what_a_function_writes_to_is_written() -> None:
    assert_like_eager(lambda x: Dirty.apply(x * 1) * 3, tracked(3))


def test_inference_calls_forward_alone() -> None:
    with torch.no_grad():
        assert_like_eager(lambda x: Numpy.apply(x) * 2, torch.randn(3))


def test_a_state_lasts_until_its_last_backward() -> None:
    x = tracked(3)
    loss = kept(lambda x: Square.apply(x).sum())(x)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(x.grad, 4 * x.detach(), "both gradients")


def test_two_forwards_have_a_state_each() -> None:
    function = kept(lambda x: Square.apply(x).sum())
    first, second = tracked(3), tracked(3)
    losses = [function(first), function(second)]
    losses[0].backward()
    losses[1].backward()
    assert_same([first.grad, second.grad], [2 * first.detach(), 2 * second.detach()], "gradients")


class Unread(torch.autograd.Function):
    """Its gradient shows whether a gradient arrived for its second result."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first * (10 if second is None else 100)


def apart(x, y):
    return Nothing.apply(x * 2, y.tanh() * 3)


def joined(x, y):
    return Nothing.apply(x, y * 1) + y * 5


def behind_each_other(x, y):
    return Nothing.apply(Square.apply(x), Square.apply(Nothing.apply(y, x)))


def in_two_parts(x, y):
    parts = torch.stack([Nothing.apply(x, y * 3), y * 2]).unbind(0)
    return Nothing.apply(parts[1], parts[0])


def told_of_none(x, y):
    first, second = Unread.apply(x)
    return first * 2 + Nothing.apply(y, second)


@pytest.mark.parametrize("function", [apart, joined, behind_each_other, in_two_parts, told_of_none])
def test_a_gradient_that_backward_leaves_out_is_none(function) -> None:
    assert_like_eager(function, tracked(3), tracked(3))


def test_zeros_for_a_gradient_that_is_left_out_make_no_nan() -> None:
    def function(x, y):
        return Nothing.apply(x, y.abs().sqrt()) + y * 2

    loss = kept(function)(tracked(3), torch.zeros(3, requires_grad=True)).sum()
    with pytest.raises(EngineError, match=r"torch\.compile: a gradient has a NaN, which eager PyTorch's may"):
        loss.backward()


def test_it_is_asked_for_by_a_truth_value() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        kept(torch.sin, keep_functions="yes")(torch.randn(3))
    assert isinstance(caught.value.inner_exception, OptionError)
    assert "Option 'keep_functions' is 'yes'; allowed is True or False." in str(caught.value)


def test_other_backends_trace_into_functions_as_before() -> None:
    graphs = []

    def noting(graph_module, inputs):
        graphs.append([str(node.target) for node in graph_module.graph.nodes])
        return graph_module

    torch.compile(lambda x: Square.apply(x), backend=noting)(torch.randn(3))
    assert not any("Square" in target for targets in graphs for target in targets)
