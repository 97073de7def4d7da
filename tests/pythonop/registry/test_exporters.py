"""Exporters: a Function becomes the operators of a registered exporter, or stays a call."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.export import Dim

import torch2ort
from tests.support.comparison import assert_trains_like_eager


class Gelu(torch.autograd.Function):
    """A Gelu times a number, with the true derivative."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.nn.functional.gelu(x) * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / 2**0.5))
        density = torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
        return grad * (cdf + x * density) * ctx.factor, None


class Halves(torch.autograd.Function):
    """Two outputs and a constant between them."""

    @staticmethod
    def forward(ctx, x):
        return x * 0.5, None, x * 2

    @staticmethod
    def backward(ctx, half, _, double):
        return half * 0.5 + double * 2


class Outer(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._call = call

    def forward(self, x):
        return self._call(self.linear(x))


NAME = f"{__name__}.Gelu"


def gelu(x):
    return Gelu.apply(x, 2.0)


def export(call=gelu, *, dynamic=False):
    shapes = {"x": {0: Dim("batch")}} if dynamic else None
    return torch2ort.export(Outer(call).eval(), torch.randn(3, 4), dynamic_shapes=shapes)


def operators(exported):
    return [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"]


def refusal(exporter, call=gelu):
    torch2ort.register_exporter(Gelu, exporter)
    with pytest.raises(torch2ort.ExportError) as error:
        export(call)
    return str(error.value)


def test_a_function_becomes_the_operators_of_its_exporter():
    @torch2ort.register_exporter(NAME)
    def _(g, x, factor):
        return g.op("Mul", g.op("com.microsoft::Gelu", x), factor)

    model, x = Outer(gelu).eval(), torch.randn(5, 4)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Gemm", "Gelu", "Mul"]
    assert exported.python_ops == ()
    torch.testing.assert_close(exported(x), model(x))


def test_a_mapped_model_runs_without_its_class(tmp_path):
    torch2ort.register_exporter(
        Gelu, lambda g, x, factor: g.op("Mul", g.op("com.microsoft::Gelu", x), factor)
    )
    model, x = Outer(gelu).eval(), torch.randn(3, 4)
    torch2ort.export(model, x).save(tmp_path / "model.onnx")
    torch.testing.assert_close(torch2ort.load(tmp_path / "model.onnx")(x), model(x))


def test_the_exporter_that_replaced_another_is_used():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: g.op("Neg", x))
    assert operators(export()) == ["Gemm", "Neg"]
    torch2ort.register_exporter(Gelu, lambda g, x, factor: g.op("Relu", x), override=True)
    assert operators(export()) == ["Gemm", "Relu"]


def test_none_leaves_the_call_a_python_op():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: None)
    assert operators(export()) == ["Gemm", "PythonOp"]


def test_none_after_some_nodes_leaves_no_trace_of_them():
    def exporter(g, x, factor):
        g.op("Relu", x)

    torch2ort.register_exporter(Gelu, exporter)
    assert operators(export()) == ["Gemm", "PythonOp"]


def test_arguments_that_are_no_tensors_arrive_as_they_are():
    seen = []
    torch2ort.register_exporter(Gelu, lambda g, x, factor: seen.append(factor))
    value = 0.1 + 2**-40
    export(lambda x: Gelu.apply(x, value))
    assert seen == [value]


def test_values_tell_dtype_and_shape():
    seen = []
    torch2ort.register_exporter(Gelu, lambda g, x, factor: seen.append((x.dtype, x.shape)))
    export(dynamic=True)
    assert seen == [(torch.float32, [sympy.Symbol("batch", integer=True, nonnegative=True), 4])]


def test_new_values_tell_dtype_and_shape():
    seen = []

    def exporter(g, x, factor):
        seen.append(g.op("Transpose", x, perm=[1, 0]).shape)
        seen.append(g.op("Greater", x, 0).dtype)

    torch2ort.register_exporter(Gelu, exporter)
    export()
    assert seen == [[4, 3], torch.bool]


def test_several_outputs():
    def exporter(g, x):
        return g.op("Mul", x, 0.5), g.op("Add", x, x)

    torch2ort.register_exporter(Halves, exporter)

    def call(x):
        half, nothing, double = Halves.apply(x)
        assert nothing is None
        return half - double

    model, x = Outer(call).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Gemm", "Mul", "Add", "Sub"]
    torch.testing.assert_close(exported(x), model(x))


def test_an_operator_with_several_outputs():
    def exporter(g, x):
        low, high = g.op("Split", x, outputs=2, axis=1, num_outputs=2)
        whole = g.op("Concat", low, high, axis=1)
        return g.op("Mul", whole, 0.5), g.op("Mul", whole, 2)

    torch2ort.register_exporter(Halves, exporter)
    model, x = Outer(lambda x: Halves.apply(x)[2]).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


def test_an_argument_may_be_returned_as_it_is():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: x)
    model, x = Outer(gelu).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model.linear(x))


def test_one_value_may_be_two_outputs():
    def exporter(g, x):
        both = g.op("Mul", x, 2)
        return both, both

    torch2ort.register_exporter(Halves, exporter)
    model, x = Outer(lambda x: torch.add(*Halves.apply(x)[::2])).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model.linear(x) * 4)


@pytest.mark.parametrize(
    ("build", "eager"),
    [
        pytest.param(lambda g, x: g.op("Add", x, 2), lambda x: x + 2, id="int beside floats"),
        pytest.param(
            lambda g, x: g.op("Where", g.op("Less", x, 0), 1, x), lambda x: x.where(x >= 0, 1.0), id="Where"
        ),
        pytest.param(lambda g, x: g.op("Gather", x, 0, axis=0), lambda x: x[0], id="index"),
        pytest.param(
            lambda g, x: g.op("Add", x, torch.arange(4, dtype=torch.float32)),
            lambda x: x + torch.arange(4),
            id="tensor",
        ),
        pytest.param(lambda g, x: g.op("Reshape", x, g.constant([-1])), lambda x: x.reshape(-1), id="list"),
        pytest.param(
            lambda g, x: g.op("Mul", x, g.constant(0.5, torch.float32)),
            lambda x: x * 0.5,
            id="number of a dtype",
        ),
        pytest.param(lambda g, x: g.op("Clip", x, None, 0.5), lambda x: x.clamp(max=0.5), id="absent input"),
        pytest.param(
            lambda g, x: g.op("Cast", x, to=torch.int64), lambda x: x.to(torch.int64), id="dtype as attribute"
        ),
        pytest.param(
            lambda g, x: g.op("Elu", x, alpha=2), lambda x: torch.nn.functional.elu(x, 2), id="int for float"
        ),
    ],
)
def test_constants_and_attributes_get_the_type_that_the_operator_wants(build, eager):
    class Any(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return eager(x)

    torch2ort.register_exporter(Any, build)
    model, x = Outer(Any.apply).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


def test_training_follows_the_engines_gradient_of_the_operators():
    torch2ort.register_exporter(
        Gelu, lambda g, x, factor: g.op("Mul", g.op("com.microsoft::Gelu", x), factor)
    )
    module = assert_trains_like_eager(Outer(gelu), [(torch.randn(3, 4, requires_grad=True),)], steps=5)
    assert module.exported.python_ops == ()


def test_training_calls_the_function_where_an_operator_has_no_registered_gradient():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: g.op("Celu", x))
    assert_trains_like_eager(Outer(gelu), [(torch.randn(3, 4),)], steps=3)


def test_an_exporter_can_tell_a_graph_in_training_mode():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: None if g.training else g.op("Celu", x))
    trained = torch2ort.export(Outer(gelu).train(), torch.randn(3, 4))
    assert [site.func_name for site in trained.python_ops] == [NAME]
    assert operators(export()) == ["Gemm", "Celu"]


def test_the_wrong_number_of_values_is_refused():
    assert refusal(lambda g, x, factor: (x, x)) == (
        f"{NAME}: its exporter returned 2 values; expected 1, one for each tensor output"
    )


def test_what_is_no_graph_value_is_refused():
    assert refusal(lambda g, x, factor: 3.0) == (
        f"{NAME}: its exporter returned 3.0; expected a graph value, a tuple of them, or None"
    )


def test_another_dtype_is_refused():
    assert refusal(lambda g, x, factor: g.op("Cast", x, to=torch.float64)) == (
        f"{NAME}: its exporter returned output 0 as torch.float64, but forward returns torch.float32; add "
        f"g.op('Cast', value, to=torch.float32)"
    )


def test_another_rank_is_refused():
    assert refusal(lambda g, x, factor: g.op("Unsqueeze", x, g.constant([0]))) == (
        f"{NAME}: its exporter returned output 0 with shape [1, 3, 4], but forward returns [3, 4]"
    )


def test_another_size_is_refused():
    assert refusal(lambda g, x, factor: g.op("Transpose", x, perm=[1, 0])) == (
        f"{NAME}: its exporter returned output 0 with shape [4, 3], but forward returns [3, 4]"
    )


def test_a_value_of_another_graph_is_refused():
    kept = []

    def exporter(g, x, factor):
        kept.append(x)
        return g.op("Add", x, kept[0])

    torch2ort.register_exporter(Gelu, exporter)
    export()
    with pytest.raises(torch2ort.ExportError) as error:
        export()
    assert str(error.value) == (
        f"{NAME}: input 1 of g.op('Add') is a value of another call's graph, GraphValue(linear, "
        f"torch.float32, "
        f"[3, 4]); expected an argument of this call, or what this g made"
    )


@pytest.mark.parametrize(
    ("exporter", "sentence"),
    [
        (
            lambda g, x, _: g.op("Reluu", x),
            "the operator Reluu is none of ONNX's own; write 'domain::Operator' for one of another domain",
        ),
        (
            lambda g, x, _: g.op("Gelu", x),
            "the operator Gelu came with opset 20, and the graph is of opset 18; export with opset=20",
        ),
        (lambda g, x, _: g.op("Relu", x, x), "Relu with 2 inputs; ONNX opset 18 has it with 1"),
        (
            lambda g, x, _: g.op("Elu", x, beta=1.0),
            "Elu has no attribute 'beta'; ONNX opset 18 has it with alpha",
        ),
        (
            lambda g, x, _: g.op("Add", x, [1.0]),
            "input 1 of g.op('Add') is [1.0]; expected a graph value, a number, a bool, a torch.Tensor or "
            "None. Use "
            "g.constant for lists and arrays",
        ),
    ],
)
def test_what_onnx_does_not_have_is_refused(exporter, sentence):
    assert refusal(exporter) == f"{NAME}: {sentence}"


def test_an_exporters_exception_arrives_as_it_is():
    raised = KeyError("mine")

    def exporter(g, x, factor):
        raise raised from ValueError("the cause")

    torch2ort.register_exporter(Gelu, exporter)
    with pytest.raises(KeyError) as error:
        export()
    assert error.value is raised


def test_a_graph_value_has_no_truth_value():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: x if x else None)
    with pytest.raises(TypeError, match="a graph value has no truth value"):
        export()


def test_an_exporter_of_one_class_leaves_another_of_the_same_name_alone():
    def make(factor):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

        return Scaled

    twice, thrice = make(2.0), make(3.0)
    torch2ort.register_exporter(twice, lambda g, x: g.op("Add", x, x))
    model, x = Outer(lambda x: thrice.apply(twice.apply(x))).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Gemm", "Add", "PythonOp"]
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("opset", [18, 20])
def test_an_exporter_sees_the_opset_that_was_asked_for(opset):
    seen = []
    torch2ort.register_exporter(Gelu, lambda g, x, factor: seen.append(g.opset))
    torch2ort.export(Outer(lambda x: Gelu.apply(x, 2.0)).eval(), torch.randn(3, 4), opset=opset)
    assert seen == [opset]


def test_an_exporter_uses_what_its_opset_has():
    torch2ort.register_exporter(Gelu, lambda g, x, factor: g.op("Gelu", x, approximate="none"))
    model, x = Outer(lambda x: Gelu.apply(x, 2.0)).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x, opset=20)
    torch.testing.assert_close(exported(x), torch.nn.functional.gelu(model.linear(x)))


@pytest.mark.parametrize("opset", [18, 21])
def test_an_exporter_uses_an_attribute_that_its_opset_has(opset):
    """DequantizeLinear has a block size from opset 21 on."""

    def exporter(g, x, factor):
        if g.opset < 21:
            return g.op("Mul", x, 2.0)
        quantized = g.op("Cast", x, to=torch.int8)
        return g.op("DequantizeLinear", quantized, g.constant([[2.0] * 4]), axis=0, block_size=3)

    torch2ort.register_exporter(Gelu, exporter)
    model, x = Outer(lambda x: Gelu.apply(x, 2.0)).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x, opset=opset)
    expected = model.linear(x) * 2 if opset < 21 else model.linear(x).to(torch.int8) * 2.0
    torch.testing.assert_close(exported(x), expected)


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_exporters_serve_every_opset(opset):
    torch2ort.register_exporter(Gelu, lambda g, x, factor: g.op("Mul", g.op("Clip", x, 0.0, 1.0), factor))
    model, x = Outer(lambda x: Gelu.apply(x, 2.0)).eval(), torch.randn(3, 4)
    torch.testing.assert_close(torch2ort.export(model, x, opset=opset)(x), model.linear(x).clamp(0, 1) * 2)
