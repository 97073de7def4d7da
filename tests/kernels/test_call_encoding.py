"""An operator call that is encoded in a graph equals the call that the model made."""

from __future__ import annotations

import pytest
import torch

from torch2ort.kernels.functions import decode_call, encode_call

aten = torch.ops.aten
X, Y = torch.linspace(-1.0, 1.0, 6).view(2, 3), torch.linspace(0.5, 3.0, 6).view(2, 3)
FIRST, SECOND = {"tensor": 0}, {"tensor": 1}

CALLS = {
    "tensors": (aten.tanh_backward.default, [FIRST, SECOND], {}),
    "tensors in another order": (aten.tanh_backward.default, [SECOND, FIRST], {}),
    "numbers behind": (aten.threshold_backward.default, [FIRST, SECOND, 0.25], {}),
    "a number in front": (aten.pow.Scalar, [2.0, FIRST], {}),
    "a list behind": (aten.sum.dim_IntList, [FIRST, [1], True], {}),
    "a keyword": (aten.add.Tensor, [FIRST, SECOND], {"alpha": 3}),
    "a dtype": (aten._log_softmax.default, [FIRST, 1, False], {}),
    "a list of tensors": (aten.cat.default, [[FIRST, SECOND], 1], {}),
    "a view": (aten.transpose.int, [FIRST, 0, 1], {}),
    "two results": (aten.max.dim, [FIRST, 1], {}),
}


@pytest.mark.parametrize(("operator", "arguments", "keywords"), CALLS.values(), ids=CALLS)
def test_a_decoded_call_gives_what_the_operator_gives(operator, arguments, keywords):
    given = (X.clone(), Y.clone())

    def filled(value):
        if isinstance(value, list):
            return [filled(v) for v in value]
        return given[value["tensor"]] if isinstance(value, dict) else value

    expected = operator(*map(filled, arguments), **keywords)
    call = decode_call(encode_call(operator, arguments, keywords, random=False))
    found = call(given[: call.tensors])
    expected = (expected,) if isinstance(expected, torch.Tensor) else tuple(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    memory = [t.untyped_storage().data_ptr() for t in given]
    assert not any(t.untyped_storage().data_ptr() in memory for t in found)


def test_numbers_that_vary_are_sizes_of_a_tensor_behind_the_others():
    arguments = [FIRST, [{"size": 1}, {"size": 0}, 3], 0, 0, {"size": 0}, 1]
    call = decode_call(encode_call(aten.slice_backward.default, arguments, {}, random=False))
    assert call.tensors == 2
    for rows, layers in ((2, 4), (1, 3)):
        grad = torch.randn(rows, rows, 3)
        (found,) = call((grad, torch.empty(rows, layers, 0, dtype=torch.int64)))
        expected = aten.slice_backward(grad, [layers, rows, 3], 0, 0, rows, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_results_come_in_the_order_of_dimensions_that_is_asked_for():
    text = encode_call(aten.max.dim, [FIRST, 1], {}, random=False, orders=[None, [0]])
    assert decode_call(text).orders == [None, [0]]
    text = encode_call(aten.mul.Tensor, [FIRST, SECOND], {}, random=False, orders=[[1, 0]])
    (found,) = decode_call(text)((X, Y))
    torch.testing.assert_close(found, (X * Y).t(), rtol=0, atol=0)


def test_a_call_that_gives_its_results_as_they_are_says_nothing_of_it():
    plain = encode_call(aten.max.dim, [FIRST, 1], {}, random=False)
    assert encode_call(aten.max.dim, [FIRST, 1], {}, random=False, orders=[None, None]) == plain
