"""A region is a text that describes its whole computation."""

from __future__ import annotations

import json

import pytest
import torch

from torch2ort.errors import EngineError, ModelLoadError
from torch2ort.fusion.region import decode_region, encode_region, in_float32
from torch2ort.kernels.functions import encode_call
from torch2ort.sizes.expressions import parse

aten = torch.ops.aten
X, BIAS = torch.randn(3, 4), torch.randn(4)


def norm() -> str:
    """``tanh(x + bias)`` normalised, and its mean."""
    calls = [
        (encode_call(aten.add.Tensor, [{"tensor": 0}, {"tensor": 1}], {}, random=False), [0, 1], ()),
        (encode_call(aten.tanh.default, [{"tensor": 0}], {}, random=False), [2], ()),
        (
            encode_call(
                aten.native_layer_norm.default, [{"tensor": 0}, [4], None, None, 1e-5], {}, random=False
            ),
            [3],
            (),
        ),
        (encode_call(aten.t.default, [{"tensor": 0}], {}, random=False), [4], ()),
    ]
    return encode_region([(torch.float32, (3, 4)), (torch.float32, (4,))], calls, [7, 5])


def test_it_computes_what_its_calls_do():
    values, mean, _ = torch.native_layer_norm(torch.tanh(X + BIAS), [4], None, None, 1e-5)
    found = decode_region(norm()).run([X, BIAS])
    torch.testing.assert_close(found, (values.t().contiguous(), mean), rtol=0, atol=0)


def test_what_it_gives_lies_in_the_order_of_its_dimensions():
    assert [t.is_contiguous() for t in decode_region(norm()).run([X, BIAS])] == [True, True]


def test_it_is_in_float32_what_it_is_in_a_half_precision():
    cast = encode_call(aten._to_copy.default, [{"tensor": 0}], {"dtype": torch.float16}, random=False)
    text = encode_region([(torch.bfloat16, (3, 4))], [(cast, [0], ())], [1])
    (found,) = decode_region(in_float32(text)).run([X])
    assert torch.equal(found, X)
    assert found.dtype is torch.float32


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.randn(5, 4), "torch.float32 of shape [5, 4]"),
        (torch.randn(3, 4, dtype=torch.float64), "torch.float64 of shape [3, 4]"),
        (torch.randn(4, 3).t(), "torch.float32 of shape [3, 4]"),
    ],
    ids=["shape", "type", "order"],
)
def test_tensors_that_it_is_not_for_are_refused(tensor, said):
    with pytest.raises(EngineError) as error:
        decode_region(norm()).check([tensor, BIAS])
    assert str(error.value) == (
        f"tensor 0 of a fused region is {said}, but it was compiled for torch.float32 of shape [3, 4], "
        f"contiguous. A Function of the model returned another shape or type than when it was exported. With "
        f"Options(fuse=False) operators run one by one"
    )


N, M = parse("n0"), parse("n1")


def rows() -> str:
    """``tanh(x).view(n0 * n1, 4)`` for ``x`` of ``[n0, n1, 4]``, and the sums of twice as many rows."""
    tanh = encode_call(aten.tanh.default, [{"tensor": 0}], {}, random=False)
    view = encode_call(aten.reshape.default, [{"tensor": 0}, [{"size": 0}, 4]], {}, random=False)
    total = encode_call(aten.sum.dim_IntList, [{"tensor": 0}, [0]], {}, random=False)
    inputs = [(torch.float32, (N, M, 4)), (torch.float32, (2 * N, 4))]
    return encode_region(inputs, [(tanh, [0], ()), (view, [2], (N * M,)), (total, [1], ())], [3, 4])


def test_sizes_that_vary_are_those_of_its_inputs():
    region = decode_region(rows())
    assert region.varying == {"n0": (0, 0), "n1": (0, 1)}
    for n, m in ((2, 3), (5, 1), (0, 7)):
        x, y = torch.randn(n, m, 4), torch.randn(2 * n, 4)
        region.check([x, y])
        assert region.is_compiled_for([x, y]) == (n > 1 and m > 1)
        torch.testing.assert_close(region.run([x, y]), (x.tanh().view(n * m, 4), y.sum(0)), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 4), (4, 5), (4,)])
def test_sizes_that_do_not_fit_each_other_are_refused(shape):
    with pytest.raises(EngineError) as error:
        decode_region(rows()).check([torch.randn(2, 3, 4), torch.randn(shape)])
    position = 1 if len(shape) == 2 else 0
    given, wanted = (list(shape), "[2*n0, 4]") if position else ([2, 3, 4], "[n0, n1, 4]")
    assert str(error.value) == (
        f"tensor {position} of a fused region is torch.float32 of shape {given}, but it was compiled for "
        f"torch.float32 of shape {wanted}, contiguous. A Function of the model returned another shape or "
        f"type than when it was exported. With Options(fuse=False) operators run one by one"
    )


@pytest.mark.parametrize(
    "size",
    [
        "n7",
        "9**9**9**9",
        "n0**9**9",
        "(n0**9)**9",
        "n0**99",
        "n0.real",
        "__import__('os')",
        "n0" * 201,
        "9" * 19,
        "n0 +",
    ],
)
def test_a_size_that_nothing_tells_is_refused(size):
    text = rows().replace('["2*n0", 4]', json.dumps([size, 4]))
    assert text != rows()
    with pytest.raises(ModelLoadError, match=r"^not a fused region: "):
        decode_region(text if size != "n7" else text.replace('"n0*n1"', '"n7*n8"'))


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"inputs": [["int", 3]], "calls": [], "outputs": []})])
def test_other_texts_are_refused(text):
    with pytest.raises(ModelLoadError, match=r"^not a fused region: "):
        decode_region(text)


def test_an_operator_that_no_file_may_call_is_refused():
    text = norm().replace("tanh", "tanh_")
    with pytest.raises(ModelLoadError, match=r"calls aten::tanh_, which no exported graph may call$"):
        decode_region(text)
