"""Tensors that an ONNX graph cannot hold are refused by name, with what to do."""

import inspect

import pytest
import torch

import torch2ort
from tests.support.around import Around
from tests.support.functions import Square

X = torch.randn(2, 4)
INSIDE = "Put all that computes with it into one torch.autograd.Function, which keeps PyTorch's kernels"


class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.to(torch.uint8).view(torch.float8_e4m3fn)


CASES = {
    "float8": (
        lambda model, h: Square.apply(h).to(torch.float8_e4m3fn).float(),
        "aten._to_copy.default at {line} gives a tensor of torch.float8_e4m3fn",
        INSIDE,
    ),
    "sparse": (
        lambda model, h: torch.sparse.mm(Square.apply(h).to_sparse(), torch.ones(4, 4)),
        "aten._to_sparse.default at {line} gives a tensor in the layout torch.sparse_coo",
        INSIDE,
    ),
    "a Function's float8": (
        lambda model, h: Packed.apply(h).float(),
        f"{__name__}.Packed at {{line}} gives a tensor of torch.float8_e4m3fn",
        "Return x.view(torch.uint8) and turn that back behind the call",
    ),
    "a Function of complex numbers": (
        lambda model, h: Square.apply(torch.complex(h, h)).abs(),
        f"{Square.__module__}.Square at {{line}} takes a tensor of torch.complex64",
        "Pass it torch.view_as_real(x) and turn that back inside of it",
    ),
}


@pytest.mark.parametrize(("call", "what", "remedy"), CASES.values(), ids=CASES)
def test_it_is_refused_where_it_would_leave_a_node(call, what, remedy):
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught, torch.no_grad():
        torch2ort.ORTModule(Around(call))(X)
    source, first = inspect.getsourcelines(Around.forward)
    line = f"{inspect.getfile(Around)}:{first + 1}, in forward: {source[1].strip()}"
    assert str(caught.value) == (
        f"{what.format(line=line)}, which cannot go from one node of an ONNX graph to another. {remedy}"
    )


@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
def test_a_nested_argument_is_refused(run):
    nested = torch.nested.nested_tensor([X[0], X[1][:2]])
    with pytest.raises(torch2ort.ExportError) as caught:
        run(Around(lambda model, h: h), nested)
    assert str(caught.value) == (
        "the argument 'x' is nested; expected a plain dense torch.Tensor. Pass x.to_padded_tensor(0.0)"
    )
