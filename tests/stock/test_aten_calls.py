"""PyTorch operators that a node calls in C++ give the Function's results, bit for bit."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.stock.single_op_session import OneCall, in_python
from tests.support.memory import resident_bytes
from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native

aten = torch.ops.aten
FLOATING = [torch.float32, torch.bfloat16, torch.float16]
HEADS_FIRST = [0, 2, 1, 3]


def given(*indices: int) -> list[dict[str, int]]:
    return [{"tensor": i} for i in indices]


def permuted(order: list[int], *indices: int) -> list[dict[str, list[object]]]:
    return [{"permuted": [i, order]} for i in indices]


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    # A tensor without elements may have any strides, some of which a view as bytes does not support.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_equal_bits(found: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    for one, other in zip(found, expected, strict=True):
        assert bits(one) == bits(other)


def assert_direct(call: OneCall, *tensors: torch.Tensor) -> None:
    """Assert that the call gives the Function's results, and calls Python the first time alone."""
    expected = in_python(call.text, tensors)
    for _ in range(3):
        assert_equal_bits(call(*tensors), expected)
    assert call.python_calls == 1


# For each operator: arguments, sizes of the tensors, keywords and orders of the results.
OPERATORS = {
    "mm": (aten.mm.default, given(0, 1), [(5, 4), (4, 3)], {}, []),
    "mm of transposed": (aten.mm.default, [*permuted([1, 0], 0), *given(1)], [(4, 5), (4, 3)], {}, []),
    "bmm": (aten.bmm.default, given(0, 1), [(2, 5, 4), (2, 4, 3)], {}, []),
    "addmm": (aten.addmm.default, given(0, 1, 2), [(3,), (5, 4), (4, 3)], {}, []),
    "addmm of transposed": (
        aten.addmm.default,
        [*given(0, 1), *permuted([1, 0], 2)],
        [(3,), (5, 4), (3, 4)],
        {"beta": 0.5, "alpha": 2},
        [],
    ),
    "baddbmm": (aten.baddbmm.default, given(0, 1, 2), [(1, 3), (2, 5, 4), (2, 4, 3)], {}, []),
    "large product": (aten.mm.default, given(0, 1), [(300, 20), (20, 300)], {}, []),
    "large sum of products": (aten.addmm.default, given(0, 1, 2), [(300,), (300, 20), (20, 300)], {}, []),
    "add": (aten.add.Tensor, given(0, 1), [(2, 3), (3,)], {}, []),
    "add a number": (aten.add.Tensor, [*given(0), 1.5], [(2, 3)], {}, []),
    "multiply by a number": (aten.mul.Tensor, [*given(0), 0.1], [(2, 3)], {}, []),
    "multiply by a scalar": (aten.mul.Scalar, [*given(0), 3.0], [(2, 3)], {}, []),
    "power": (aten.pow.Tensor_Scalar, [*given(0), 3.0], [(2, 3)], {}, []),
    "cast": (aten._to_copy.default, given(0), [(2, 3)], {"dtype": torch.bfloat16}, []),
    "cast back": (aten._to_copy.default, given(0), [(2, 3)], {"dtype": torch.float32}, []),
    "sum": (aten.sum.dim_IntList, [*given(0), [0], True], [(4, 3)], {}, []),
    "gelu": (aten.gelu.default, given(0), [(4, 3)], {"approximate": "tanh"}, []),
    "softmax": (aten._softmax.default, [*given(0), -1, False], [(4, 3)], {}, []),
    "large gelu": (aten.gelu.default, given(0), [(300, 200)], {}, []),
    "gelu of transposed": (aten.gelu.default, permuted([1, 0], 0), [(300, 200)], {}, []),
    "derivative of gelu": (
        aten.gelu_backward.default,
        [*permuted([1, 0], 0), *given(1)],
        [(200, 300), (300, 200)],
        {"approximate": "tanh"},
        [],
    ),
    "sigmoid": (aten.sigmoid.default, given(0), [(300, 200)], {}, []),
    "derivative of sigmoid": (aten.sigmoid_backward.default, given(0, 0), [(300, 200)], {}, []),
    "silu": (aten.silu.default, given(0), [(300, 200)], {}, []),
    "derivative of silu": (aten.silu_backward.default, given(0, 0), [(300, 200)], {}, []),
    "derivative of tanh": (aten.tanh_backward.default, given(0, 0), [(300, 200)], {}, []),
    "logarithm of softmax": (aten._log_softmax.default, [*given(0), 1, False], [(300, 200)], {}, []),
    "derivative of softmax": (
        aten._softmax_backward_data.default,
        [*given(0, 0), -1, torch.float32],
        [(300, 200)],
        {},
        [],
    ),
    "derivative of the logarithm of softmax": (
        aten._log_softmax_backward_data.default,
        [*given(0, 0), 0, torch.float32],
        [(300, 200)],
        {},
        [],
    ),
    "layer norm": (
        aten.native_layer_norm.default,
        [*given(0), [6], *given(1, 1), 1e-5],
        [(4, 6), (6,)],
        {},
        [],
    ),
    "layer norm without weights": (
        aten.native_layer_norm.default,
        [*given(0), [6], None, None, 1e-5],
        [(4, 6)],
        {},
        [],
    ),
    "convolution": (
        aten.convolution.default,
        [*given(0, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1],
        [(2, 3, 8, 8), (4, 3, 3, 3)],
        {},
        [],
    ),
    "convolution backward with a mask": (
        aten.convolution_backward.default,
        [*given(0, 1, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]],
        [(2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3)],
        {},
        [],
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        permuted(HEADS_FIRST, 0, 0, 0),
        [(2, 6, 4, 8)],
        {"scale": 0.125},
        [HEADS_FIRST, [0, 2, 1]],
    ),
    "result in other strides": (aten.tanh.default, permuted([1, 0], 0), [(300, 200)], {}, []),
    "result that is an argument": (aten.dropout.default, [*given(0), 0.5, False], [(300, 200)], {}, []),
    "without dimensions": (aten.tanh.default, given(0), [()], {}, []),
    "without elements": (aten.tanh.default, given(0), [(0, 3)], {}, []),
    "product without elements": (aten.mm.default, given(0, 1), [(0, 4), (4, 3)], {}, []),
    "sum of products of nothing": (aten.addmm.default, given(0, 1, 2), [(3,), (5, 0), (0, 3)], {}, []),
}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_functions_bits_without_python(name, dtype):
    operator, arguments, sizes, keywords, orders = OPERATORS[name]
    tensors = [numbers(*size, dtype=dtype) for size in sizes]
    call = OneCall(operator, arguments, tensors, keywords=keywords, orders=orders)
    assert_direct(call, *tensors)


def test_special_numbers_are_rounded_as_in_eager():
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0, 1e-45, 3.4e38, 1.00390625])
    call = OneCall(aten._to_copy.default, given(0), [special], keywords={"dtype": torch.bfloat16})
    assert_direct(call, special)


def test_sizes_vary_from_call_to_call():
    call = OneCall(aten.addmm.default, given(0, 1, 2), [numbers(3), numbers(5, 4), numbers(4, 3)])
    for rows in (5, 1, 0, 700):
        assert_equal_bits(
            call(numbers(3), numbers(rows, 4), numbers(4, 3)),
            in_python(call.text, (numbers(3), numbers(rows, 4), numbers(4, 3))),
        )


def test_a_size_is_an_argument():
    like = torch.empty(7, 2, 0, dtype=torch.int64)
    arguments = [*given(0), [{"size": 0}, {"size": 1}, 3]]
    call = OneCall(aten.expand_copy.default, arguments, [numbers(1, 2, 3), like])
    assert_direct(call, numbers(1, 2, 3), like)
    other = torch.empty(4, 2, 0, dtype=torch.int64)
    assert call(numbers(1, 2, 3), other)[0].shape == (4, 2, 3)


def test_bools_and_indices_cross():
    x, mask = torch.arange(6).reshape(2, 3), torch.tensor([[True, False, True], [False, False, True]])
    assert_direct(OneCall(aten.bitwise_and.Tensor, given(0, 1), [mask, mask]), mask, mask)
    assert_direct(OneCall(aten.where.self, given(0, 1, 1), [mask, x]), mask, x)
    index = torch.tensor([1, 0])
    assert_direct(OneCall(aten.index.Tensor, [*given(0), [None, *given(1)]], [x, index]), x, index)


def test_an_error_is_the_operators_own_and_the_next_call_works():
    table, good = numbers(4, 3), torch.tensor([1, 2])
    call = OneCall(aten.embedding.default, given(0, 1), [table, good])
    call(table, good)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range in self"):
            call(table, torch.tensor([1, 9]))
    calls = call.python_calls
    assert_equal_bits(call(table, good), (table[good],))
    assert call.python_calls == calls


def test_what_is_broadcast_runs_in_python():
    grad, output = numbers(1, 3), numbers(4, 3)
    call = OneCall(aten.tanh_backward.default, given(0, 1), [grad, output])
    for _ in range(3):
        assert_equal_bits(call(grad, output), in_python(call.text, (grad, output)))


def test_a_product_that_does_not_fit_is_refused_in_torchs_words():
    call = OneCall(aten.addmm.default, given(0, 1, 2), [numbers(3), numbers(5, 4), numbers(4, 3)])
    call(numbers(3), numbers(5, 4), numbers(4, 3))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x4 and 2x3\)"):
        call(numbers(3), numbers(5, 4), numbers(2, 3))


def test_an_operator_that_writes_to_an_argument_is_refused_as_ever():
    x, mean, var = numbers(4, 3, 2), torch.zeros(3), torch.ones(3)
    arguments = [*given(0), None, None, *given(1, 2), True, 0.1, 1e-5, False]
    call = OneCall(aten.instance_norm.default, arguments, [x, mean, var])
    for _ in range(2):
        with pytest.raises(EngineError, match="forward wrote to argument 2"):
            call(x, torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        pytest.param(aten.slice.Tensor, [*given(0), 0, 0, 1], id="a view"),
        pytest.param(aten.add.Tensor, [*given(0), 1], id="a number of integers"),
    ],
)
def test_what_the_interface_cannot_hold_runs_in_python(operator, arguments):
    x = torch.arange(6).reshape(2, 3)
    call = OneCall(operator, arguments, [x])
    assert not call.is_direct
    assert_equal_bits(call(x), in_python(call.text, [x]))


def test_gradients_are_recorded_by_nobody_and_stay_on():
    call = OneCall(aten.mm.default, given(0, 1), [numbers(2, 2), numbers(2, 2)])
    with torch.enable_grad():
        for _ in range(3):
            (found,) = call(numbers(2, 2), numbers(2, 2))
        assert torch.is_grad_enabled()
    assert not found.requires_grad


def test_zeros_without_memory_are_given_some():
    x = numbers(2, 3)
    call = OneCall(aten._efficientzerotensor.default, [[{"size": 0}, 3]], [x])
    for _ in range(3):
        assert_equal_bits(call(x), (torch.zeros(2, 3),))


def test_a_result_is_no_arguments_memory():
    x = numbers(300, 200)
    call = OneCall(aten.dropout.default, [*given(0), 0.5, False], [x])
    for _ in range(3):
        (found,) = call(x)
    found.zero_()
    assert x.abs().sum() > 0


@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(aten.tan.default, id="memory of torch's"),
        pytest.param(aten.tanh.default, id="memory of the runtime's"),
    ],
)
def test_memory_of_results_is_freed(operator):
    x = numbers(1000, 1000)
    call = OneCall(operator, given(0), [x])
    for _ in range(3):
        call(x)
    before = resident_bytes()
    for _ in range(50):
        call(x)
    assert resident_bytes() - before < 20 * x.nbytes


def test_results_outlive_the_session():
    x = numbers(300, 300)
    call = OneCall(aten.tanh.default, given(0), [x])
    call(x)
    (found,) = call(x)
    del call
    assert_equal_bits([found], (torch.tanh(x),))


def test_threads_call_at_once():
    x = numbers(300, 300)
    call = OneCall(aten.mm.default, given(0, 1), [x, x])
    expected = in_python(call.text, (x, x))
    found: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(20):
            found.extend(call(x, x))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for result in found:
        assert_equal_bits([result], expected)


def test_a_torch_without_what_a_call_needs_is_named():
    call = OneCall(aten.tanh.default, given(0), [numbers(2)])
    site = call.site
    with pytest.raises(NotImplementedError, match="this torch cannot be asked for aten::tanh in C"):
        native.DirectCall(
            site=site,
            operator="aten::tanh",
            overload="",
            arguments=[("tensor", 0)],
            results=[(True, ())],
            function="aoti_torch_cpu_no_such_function",
            numbers=[1.0],
            written=None,
            grad_mode=False,
        )
