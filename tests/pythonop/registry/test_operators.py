"""Operators of torch and gradients of ONNX operators that users register."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import torch2ort
from tests.support.comparison import assert_trains_like_eager

LIBRARY = torch.library.Library("torch2ort_test_ops", "DEF")
LIBRARY.define("scale(Tensor x, float factor=2.0) -> Tensor")
LIBRARY.define("minmax(Tensor x) -> (Tensor, Tensor)")


@torch.library.impl(LIBRARY, "scale", "CompositeExplicitAutograd")
def _scale(x, factor=2.0):
    return x * factor


@torch.library.impl(LIBRARY, "minmax", "CompositeExplicitAutograd")
def _minmax(x):
    return x.amin(-1), x.amax(-1)


class Wrap(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._call = call

    def forward(self, x):
        return self._call(self.linear(x))


def operators(exported):
    return [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"]


def check(call, *expected):
    model, x = Wrap(call).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x, dynamic_shapes={"x": {0: Dim("batch")}})
    assert operators(exported) == ["Gemm", *expected]
    longer = torch.randn(5, 4)
    torch.testing.assert_close(exported(longer), model(longer))


def test_an_operator_of_torch_becomes_what_is_registered():
    torch2ort.register_symbolic("aten::sinh", lambda g, x: g.op("Sinh", x))
    check(torch.sinh, "Sinh")


def test_a_registered_operator_is_not_decomposed():
    @torch2ort.register_symbolic("aten::hardswish")
    def _(g, x):
        return g.op("HardSwish", x)

    check(torch.nn.functional.hardswish, "HardSwish")


def test_an_operator_of_a_library_becomes_what_is_registered():
    torch2ort.register_symbolic("torch2ort_test_ops::scale", lambda g, x, factor=2.0: g.op("Mul", x, factor))
    check(lambda x: torch.ops.torch2ort_test_ops.scale(x, 3.0), "Mul")


def test_an_operator_of_a_library_without_a_translation_is_refused_by_name():
    with pytest.raises(torch2ort.UnsupportedOperatorError) as error:
        check(torch.ops.torch2ort_test_ops.scale)
    assert str(error.value).startswith("torch2ort_test_ops.scale.default at ")
    assert str(error.value).endswith(
        "has no translation to ONNX. Register one with torch2ort.register_symbolic, or use other operators"
    )


def test_an_operator_with_several_outputs():
    torch2ort.register_symbolic(
        "torch2ort_test_ops::minmax",
        lambda g, x: (
            g.op("ReduceMin", x, g.constant([-1]), keepdims=0),
            g.op("ReduceMax", x, g.constant([-1]), keepdims=0),
        ),
    )
    check(lambda x: torch.sub(*torch.ops.torch2ort_test_ops.minmax(x)), "ReduceMin", "ReduceMax", "Sub")


def test_one_overload_goes_before_the_name_of_all():
    torch2ort.register_symbolic("aten::add", lambda g, x, y, alpha=1: g.op("Sub", x, y))
    torch2ort.register_symbolic("aten::add.Tensor", lambda g, x, y, alpha=1: g.op("Add", x, y))
    check(lambda x: x + x, "Add")


def test_none_leaves_the_translation_that_was_there():
    torch2ort.register_symbolic("aten::gelu", lambda g, x, approximate="none": None)
    check(torch.nn.functional.gelu, "Div", "Erf", "Add", "Mul", "Mul")


def test_none_leaves_torchs_translation():
    torch2ort.register_symbolic("aten::sinh", lambda g, x: None)
    check(torch.sinh, "Sinh")


def test_dtypes_arrive_as_torchs():
    seen = []

    def cast(g, x, dtype=None, **options):
        seen.append(dtype)
        return g.op("Cast", x, to=dtype)

    torch2ort.register_symbolic("aten::_to_copy", cast)
    check(lambda x: x.to(torch.float64), "Cast")
    assert seen == [torch.float64]


def test_the_wrong_number_of_values_is_refused():
    torch2ort.register_symbolic("aten::sinh", lambda g, x: (x, x))
    with pytest.raises(torch2ort.ExportError) as error:
        check(torch.sinh)
    assert str(error.value) == (
        "aten::sinh: its translation returned 2 values; expected 1, one for each tensor output"
    )


def test_a_translations_exception_arrives_as_it_is():
    raised = KeyError("mine")

    def translation(g, x):
        raise raised

    torch2ort.register_symbolic("aten::sinh", translation)
    with pytest.raises(KeyError) as error:
        check(torch.sinh)
    assert error.value is raised


def test_training_keeps_torchs_gradient_where_the_operators_have_none():
    torch2ort.register_symbolic("aten::sinh", lambda g, x: g.op("Sinh", x))
    assert_trains_like_eager(Wrap(torch.sinh), [(torch.randn(3, 4),)], steps=3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "gelu",
            "'gelu' is no operator of torch; expected a name such as 'aten::gelu' or 'mylib::op.overload'",
        ),
        (
            "aten::hardswich",
            f"torch {torch.__version__} has no operator 'aten::hardswich'; did you mean 'aten::hardswish' or "
            "'aten::hardswish_'?",
        ),
    ],
)
def test_what_is_no_operator_of_torch_is_refused(name, sentence):
    torch.ops.aten.hardswish  # noqa: B018 - torch lists an operator that was looked up
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.register_symbolic(name, lambda g, x: x)
    assert str(error.value) == f"register_symbolic: {sentence}"


class Celu(torch.autograd.Function):
    """Mapped to an operator that has no gradient unless one is registered."""

    @staticmethod
    def forward(ctx, x, alpha):
        return torch.nn.functional.celu(x, alpha)


class CeluModel(torch.nn.Module):
    """Calls torch's own operator in eager PyTorch, and in an export a Function that an exporter maps."""

    def __init__(self, alpha):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._alpha = alpha

    def forward(self, x):
        hidden = self.linear(x)
        if torch.compiler.is_exporting():
            return Celu.apply(hidden, self._alpha)
        return torch.nn.functional.celu(hidden, self._alpha)


def celu_gradient(g, inputs, outputs, grads, alpha=1.0):
    slope = g.op("Exp", g.op("Div", inputs[0], alpha))
    return g.op("Mul", grads[0], g.op("Where", g.op("Greater", inputs[0], 0), 1, slope))


@pytest.fixture
def _mapped():
    torch2ort.register_exporter(Celu, lambda g, x, alpha: g.op("Celu", x, alpha=alpha))


@pytest.mark.usefixtures("_mapped")
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_registered_gradient_trains_like_eager_whatever_the_attributes(alpha):
    torch2ort.register_gradient("Celu")(celu_gradient)
    module = assert_trains_like_eager(CeluModel(alpha), [(torch.randn(3, 4),)], steps=3)
    assert module.exported.python_ops == ()


@pytest.mark.usefixtures("_mapped")
def test_a_gradient_that_is_replaced_is_used_in_its_new_form():
    torch2ort.register_gradient("Celu", lambda g, inputs, outputs, grads, alpha: grads[0])
    assert_model = torch2ort.ORTModule(CeluModel(1.0))
    assert_model(torch.randn(3, 4)).sum().backward()
    torch2ort.register_gradient("Celu", celu_gradient, override=True)
    assert_trains_like_eager(CeluModel(1.0), [(torch.randn(3, 4),)], steps=3)


@pytest.mark.usefixtures("_mapped")
def test_a_gradient_that_is_unregistered_is_gone():
    torch2ort.register_gradient("Celu", lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], 7))
    torch2ort.ORTModule(CeluModel(1.0))(torch.randn(3, 4)).sum().backward()
    torch2ort.unregister("Celu")
    with pytest.raises(NotImplementedError, match=r"^You must implement either the backward"):
        torch2ort.ORTModule(CeluModel(1.0))(torch.randn(3, 4)).sum().backward()


@pytest.mark.usefixtures("_mapped")
@pytest.mark.parametrize(
    ("gradient", "sentence"),
    [
        (
            lambda g, inputs, outputs, grads, alpha: 1.0,
            "the gradient returned 1.0; expected the gradient of the first input, or a tuple with one for "
            "each "
            "input, None for those that have none",
        ),
        (
            lambda g, inputs, outputs, grads, alpha: (grads[0], grads[0]),
            "the gradient returned 2 gradients for a node with 1 inputs",
        ),
        (
            lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], "x"),
            "input 1 of g.op('Mul') is 'x'; expected one of inputs, outputs or grads, a value of g.op, a "
            "number, or "
            "None",
        ),
    ],
)
def test_a_malformed_gradient_is_refused_at_export(gradient, sentence):
    torch2ort.register_gradient("Celu", gradient)
    with pytest.raises(torch2ort.ExportError) as error:
        torch2ort.ORTModule(CeluModel(1.0))(torch.randn(3, 4))
    assert str(error.value) == f"register_gradient('Celu'): {sentence}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "a b",
            "'a b' is no operator of ONNX; expected a name such as 'Softplus' or 'com.microsoft::MatMulBnb4'",
        ),
        ("Softpluss", "ONNX has no operator 'Softpluss'; did you mean 'Softplus'?"),
    ],
)
def test_what_is_no_operator_of_onnx_is_refused(name, sentence):
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.register_gradient(name, celu_gradient)
    assert str(error.value) == f"register_gradient: {sentence}"
