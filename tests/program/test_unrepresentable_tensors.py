"""Tensors that an ONNX graph cannot represent are refused by name, with a remedy."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

import torch2ort
from tests.ops.snippets import TORCH_2_11
from tests.support.callable_module import CallableModule
from tests.support.functions import Square

X = torch.randn(2, 4)
INSIDE = "Put all that computes with it into one torch.autograd.Function, which keeps PyTorch's kernels"


class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.to(torch.uint8).view(torch.float8_e4m3fn)


class Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).view(-1)


class InSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).relu().dequantize()


CASES = {
    "float8": (
        lambda model, h: Square.apply(h).to(torch.float8_e4m3fn).float(),
        "aten._to_copy.default at {line} returns a tensor of torch.float8_e4m3fn",
        INSIDE,
    ),
    "quantised": (
        lambda model, h: torch.ops.aten.quantize_per_tensor(h, 0.1, 0, torch.qint8).dequantize(),
        "aten.quantize_per_tensor.default at {line} returns a tensor that is quantised",
        INSIDE,
    ),
    "sparse": (
        lambda model, h: torch.sparse.mm(Square.apply(h).to_sparse(), torch.ones(4, 4)),
        "aten._to_sparse.default at {line} returns a tensor in the layout torch.sparse_coo",
        INSIDE,
    ),
    "a Function's float8": (
        lambda model, h: Packed.apply(h).float(),
        f"{__name__}.Packed at {{line}} returns a tensor of torch.float8_e4m3fn",
        "Return x.view(torch.uint8) and convert that back after the call",
    ),
    "a Function of complex numbers": (
        lambda model, h: Square.apply(torch.complex(h, h)).abs(),
        f"{Square.__module__}.Square at {{line}} reads a tensor of torch.complex64",
        "Pass it torch.view_as_real(x) and convert that back inside of it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_where_it_would_leave_a_node(name):
    if name == "quantised" and TORCH_2_11:
        pytest.skip("torch 2.11 cannot trace quantize_per_tensor, so that its own error arrives")
    call, what, remedy = CASES[name]
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught, torch.no_grad():
        torch2ort.ORTModule(CallableModule(call))(X)
    source, first = inspect.getsourcelines(CallableModule.forward)
    line = f"{inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()}"
    assert str(caught.value) == (
        f"{what.format(line=line)}, which cannot go from one node of an ONNX graph to another. {remedy}"
    )


COMPLEX = {
    "computed": lambda model, h: torch.view_as_complex(h.view(2, 2, 2)),
    "of a table": lambda model, h: (h, torch.ones(2, dtype=torch.complex64) * 2),
    "in double precision": lambda model, h: torch.complex(h.double(), h.double()),
}


@torch.no_grad()
@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
@pytest.mark.parametrize("name", COMPLEX)
def test_an_output_of_complex_numbers_is_refused(name, run):
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        run(CallableModule(COMPLEX[name]).eval(), X)
    dtype = "complex128" if name == "in double precision" else "complex64"
    source, first = inspect.getsourcelines(CallableModule.forward)
    line = f"{inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()}"
    assert re.fullmatch(
        rf"the model returns torch\.{dtype} \(\w+ at {re.escape(line)}\), but outputs of an ONNX graph are "
        r"real numbers\. Return torch\.view_as_real\(x\), and apply torch\.view_as_complex to the result of "
        r"the call",
        str(caught.value),
    )


@torch.no_grad()
def test_an_operator_that_onnx_has_not_for_complex_numbers_is_refused():
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.export(CallableModule(lambda model, h: torch.linalg.eigvals(h @ h.mT).abs()).eval(), X)
    source, first = inspect.getsourcelines(CallableModule.forward)
    assert str(caught.value) == (
        f"an operator at {inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()} "
        f"computes with complex numbers, of which an ONNX graph has pairs of real ones, and ONNX has none "
        f"for these. {INSIDE}"
    )


MAKES_COMPLEX = {
    "a number is added": lambda model, h: torch.view_as_real(torch.view_as_complex(h.view(2, 2, 2)) + 1.0),
    "ones": lambda model, h: torch.view_as_real(
        torch.ones(2, dtype=torch.complex64) * torch.view_as_complex(h.view(2, 2, 2))
    ),
    "a number by itself": lambda model, h: (torch.full((4,), 2j) * torch.complex(h, h)).real,
}


@torch.no_grad()
@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
@pytest.mark.parametrize("name", MAKES_COMPLEX)
def test_complex_numbers_of_onnx_itself_are_refused(name, run):
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        run(CallableModule(MAKES_COMPLEX[name]).eval(), X)
    source, first = inspect.getsourcelines(CallableModule.forward)
    assert str(caught.value) == (
        f"an operator at {inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()} "
        f"computes with complex numbers, of which an ONNX graph has pairs of real ones, and ONNX has none "
        f"for these. {INSIDE}"
    )


def rotated(model, h):
    """Rotate queries as Llama's reference code does."""
    return torch.view_as_real(torch.view_as_complex(h.reshape(2, 2, 2)) * model.turns).flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_complex_weight_that_is_read_is_refused(is_buffer, run):
    model, turns = CallableModule(rotated).eval(), torch.polar(torch.ones(2), torch.randn(2))
    model.register_buffer("turns", turns) if is_buffer else model.register_parameter(
        "turns", torch.nn.Parameter(turns)
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        run(model, X)
    source, first = inspect.getsourcelines(CallableModule.forward)
    assert str(caught.value) == (
        f"aten.mul.Tensor at {inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()} "
        f"reads a tensor of the model's of torch.complex64, of which an ONNX graph has pairs of real "
        f"numbers. Keep torch.view_as_real(x) in its place, and call torch.view_as_complex of it in forward"
    )


@torch.no_grad()
def test_pairs_in_the_place_of_a_complex_weight_are_turned_back_in_forward():
    model = CallableModule(
        lambda model, h: rotated(SimpleNamespace(turns=torch.view_as_complex(model.pairs)), h)
    )
    model.eval().register_buffer("pairs", torch.view_as_real(torch.polar(torch.ones(2), torch.randn(2))))
    for run in (torch2ort.export(model, X), torch2ort.ORTModule(model)):
        torch.testing.assert_close(run(X), model(X))


@torch.no_grad()
def test_an_inverse_transform_is_exported():
    """``unfold_backward`` makes an int32 index, which ONNX does not accept."""
    window = torch.hann_window(16)

    class Inverse(torch.nn.Module):
        def forward(self, x):
            frames = torch.stft(x, 16, 8, window=window, return_complex=True)
            return torch.istft(frames, 16, 8, window=window)

    x = torch.randn(2, 64)
    torch.testing.assert_close(torch2ort.export(Inverse().eval(), x)(x), Inverse()(x))


@torch.no_grad()
def test_a_complex_buffer_that_nobody_reads_is_none_of_the_graphs():
    model = CallableModule(lambda model, h: h * 2).eval()
    model.register_buffer("turns", torch.polar(torch.ones(2), torch.randn(2)))
    torch.testing.assert_close(torch2ort.export(model, X)(X), model(X))


@torch.no_grad()
def test_pairs_of_real_numbers_are_turned_back_behind_the_call():
    model = CallableModule(lambda model, h: torch.view_as_real(torch.fft.fft(h))).eval()
    for run in (torch2ort.export(model, X), torch2ort.ORTModule(model)):
        torch.testing.assert_close(torch.view_as_complex(run(X)), torch.fft.fft(model.linear(X)))


@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
def test_a_nested_argument_is_refused(run):
    nested = torch.nested.nested_tensor([X[0], X[1][:2]])
    with pytest.raises(torch2ort.ExportError) as caught:
        run(CallableModule(lambda model, h: h), nested)
    assert str(caught.value) == (
        "the argument 'x' is nested; expected a plain dense torch.Tensor. Pass x.to_padded_tensor(0.0)"
    )


@pytest.mark.parametrize(
    "quantise",
    [
        lambda h: torch.quantize_per_tensor(h, 0.1, 0, torch.qint8),
        lambda h: torch.quantize_per_channel(h, torch.ones(4), torch.zeros(4).long(), 1, torch.qint8),
        lambda h: torch.quantize_per_tensor_dynamic(h, torch.qint8, reduce_range=False),
    ],
)
@pytest.mark.parametrize("read", [torch.Tensor.dequantize, torch.Tensor.int_repr])
def test_quantising_is_refused_while_it_is_traced(quantise, read):
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(CallableModule(lambda model, h: read(quantise(h))), X)
    assert re.fullmatch(
        rf"CallableModule: {re.escape(__file__)}:\d+ in <lambda> \(lambda h: torch.quantize_per_.*\) makes a "
        r"quantised tensor, which a graph cannot hold. Use torch.fake_quantize_per_tensor_affine, or put all "
        r"that computes with it into one torch.autograd.Function, which keeps PyTorch's kernels",
        str(caught.value),
    )


def test_a_function_that_gives_a_quantised_tensor_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(CallableModule(lambda model, h: Quantised.apply(h)), X)
    assert str(caught.value) == (
        f"{__name__}.Quantised: forward returned a quantised tensor as output 0, which cannot go from one "
        f"node of an ONNX graph to another. Return x.dequantize() and quantise it again after the call"
    )


def test_a_function_computes_with_quantised_tensors():
    model = CallableModule(lambda model, h: InSteps.apply(h))
    torch.testing.assert_close(torch2ort.export(model, X)(X), model(X))


def test_a_quantised_buffer_is_refused():
    model = CallableModule(lambda model, h: h + model.steps.dequantize())
    model.register_buffer("steps", torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8))
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(model, X)
    assert str(caught.value) == (
        "CallableModule: 'steps' is quantised, which a graph cannot hold. Keep it as steps.dequantize()"
    )


@pytest.mark.parametrize("run", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_sparse_weight_that_is_read_is_refused(is_buffer, run):
    model = CallableModule(lambda model, h: torch.sparse.mm(model.adjacent, h))
    model.register_buffer("adjacent", torch.eye(2).to_sparse()) if is_buffer else setattr(
        model, "adjacent", torch.eye(2).to_sparse()
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        run(model, X)
    assert re.fullmatch(
        r"aten\.\S+ at .*callable_module\.py:\d+, in forward: return self\.call\(self, "
        r"self\.linear\(x\)\) reads a tensor of the model's in the layout torch\.sparse_coo, "
        r"which a graph cannot hold\. Keep x\.to_dense"
        r"\(\) in its place, or keep it in a torch\.autograd\.Function that computes with it",
        str(caught.value),
    )


def test_a_sparse_buffer_that_nobody_reads_is_none_of_the_graphs():
    model = CallableModule(lambda model, h: h * 2).eval()
    model.register_buffer("adjacent", torch.eye(2).to_sparse())
    torch.testing.assert_close(torch2ort.export(model, X)(X), model(X))


def test_packed_weights_are_refused():
    model = torch.nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(4, 4))
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(model, X)
    assert str(caught.value) == (
        "Sequential: '0._packed_params._packed_params' holds the packed weights of a quantised layer, which "
        "a graph cannot hold. Export or wrap the model before it is converted"
    )


def test_a_quantised_argument_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(
            CallableModule(lambda model, h: h), torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
        )
    assert str(caught.value) == (
        "the argument 'x' is quantised; expected a plain dense torch.Tensor. Pass x.dequantize()"
    )
