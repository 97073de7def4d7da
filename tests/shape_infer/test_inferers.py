"""Shape inferers: sizes that propagate through a Function, and results that cannot be true."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import sympy
import torch
from onnx_shape_inference import infer_symbolic_shapes
from torch.export import Dim

import torch2ort
from torch2ort.shape_infer import infer


class Repeat(torch.autograd.Function):
    """Repeats ``x`` by numpy, so that torch does not know the sizes of the result."""

    @staticmethod
    def forward(ctx, x, times):
        return torch.from_numpy(np.concatenate([x.detach().numpy()] * times))

    @staticmethod
    def backward(ctx, grad):
        return grad[: grad.shape[0] // 2], None


class Model(torch.nn.Module):
    def __init__(self, after=torch.relu, call=lambda x: Repeat.apply(x, 2)):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._call = call
        self._after = after

    def forward(self, x):
        return self._after(self._call(self.linear(x)))


NAME = f"{__name__}.Repeat"
SHAPES = {"x": {0: Dim("batch", max=1000)}}


def repeat(node, shapes, dtypes):
    rows, *rest = shapes[0]
    return [[rows * node.arguments[1], *rest]], dtypes


def export(model=None, *, shapes=SHAPES):
    return torch2ort.export((model or Model()).eval(), torch.randn(3, 4), dynamic_shapes=shapes)


def shapes_of(exported):
    """Shape of every value that the graph names."""
    graph = exported.proto.graph
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def output_of(exported):
    return shapes_of(exported)[exported.proto.graph.output[0].name]


def refusal(inferer, **options):
    torch2ort.register_shape_inferer(Repeat, inferer)
    with pytest.raises(torch2ort.ShapeInferenceError) as error:
        export(**options)
    return str(error.value)


def test_an_inferers_sizes_reach_the_output():
    torch2ort.register_shape_inferer(NAME, repeat)
    assert output_of(export()) == ["2*batch", 4]


def test_an_inferers_sizes_are_on_the_value_behind_the_function():
    torch2ort.register_shape_inferer(NAME, repeat)
    exported = export()
    node = next(n for n in exported.proto.graph.node if n.op_type == "PythonOp")
    assert shapes_of(exported)[node.output[1]] == ["2*batch", 4]


def test_an_inferer_gets_what_it_was_promised():
    seen = []

    def inferer(node, shapes, dtypes):
        seen.append((node.func_name, node.arguments, shapes, dtypes))
        return repeat(node, shapes, dtypes)

    torch2ort.register_shape_inferer(Repeat, inferer)
    export()
    batch = sympy.Symbol("batch", integer=True, nonnegative=True)
    assert {repr(s) for s in seen} == {repr((NAME, {1: 2}, [[batch, 4]], [torch.float32]))}
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("after", "output"),
    [
        pytest.param(lambda x: x.reshape(-1, 8), ["batch", 8], id="reshape with -1"),
        pytest.param(lambda x: x @ x.T, ["2*batch", "2*batch"], id="matmul"),
        pytest.param(lambda x: x if x.shape[0] > x.shape[1] * 0 - 1 else -x, ["2*batch", 4], id="comparison"),
        pytest.param(lambda x: torch.cat([x, x[:1]]), ["2*batch+1", 4], id="cat"),
        pytest.param(lambda x: x.unflatten(0, (2, -1)).sum(0), ["batch", 4], id="unflatten"),
        pytest.param(lambda x: x + torch.zeros(x.shape[0], 1), ["2*batch", 4], id="broadcast"),
    ],
)
def test_operators_behind_a_function_keep_the_names(after, output):
    torch2ort.register_shape_inferer(Repeat, repeat)
    model = Model(after).eval()
    exported = export(model)
    assert output_of(exported) == output
    x = torch.randn(7, 4)
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x: x if x.shape[0] > 2 else -x, id="comparison"),
        pytest.param(lambda x: x if x.numel() else -x, id="is it empty"),
        pytest.param(lambda x: (x.shape[0] % 2 == 0 and x) + 1, id="is it even"),
        pytest.param(lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), id="statistics"),
    ],
)
def test_what_does_not_export_without_an_inferer_does_with_one(after):
    with pytest.raises(torch2ort.ExportError):
        export(Model(after))
    torch2ort.register_shape_inferer(Repeat, repeat)
    model = Model(after).eval()
    exported = export(model, shapes={"x": {0: Dim("batch", min=2, max=1000)}})
    x = torch.randn(6, 4)
    torch.testing.assert_close(exported(x), model(x))


def test_without_an_inferer_every_size_is_a_fresh_symbol():
    assert not {"batch", 4} & set(output_of(export()))


def test_a_forward_that_reads_a_size_does_not_fix_it():
    class Fixes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_zeros(int(x.shape[0]), 4) + x

    call = Fixes.apply
    assert not {"batch", 4} & set(output_of(export(Model(call=call))))
    torch2ort.register_shape_inferer(Fixes, lambda node, shapes, dtypes: (shapes, dtypes))
    assert output_of(export(Model(call=call))) == ["batch", 4]


def test_the_names_of_dynamic_shapes_are_on_inputs_and_weights_products():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return torch.cat([x, y], 1)

    shapes = {"x": {0: Dim("batch"), 1: Dim("seq")}, "y": {0: Dim("batch")}}
    exported = torch2ort.export(Sum(), (torch.randn(3, 5), torch.randn(3, 1)), dynamic_shapes=shapes)
    assert shapes_of(exported) == {"x": ["batch", "seq"], "y": ["batch", 1], "output": ["batch", "seq+1"]}


def test_a_derived_dimension_is_written_by_its_root():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x + y[::2]

    batch = Dim("batch", max=100)
    shapes = {"x": {0: batch}, "y": {0: 2 * batch}}
    exported = torch2ort.export(Sum(), (torch.randn(3, 4), torch.randn(6, 4)), dynamic_shapes=shapes)
    assert shapes_of(exported)["y"] == ["2*batch", 4]


def test_a_size_that_does_not_fit_is_named_as_the_user_named_it():
    exported = export()
    with pytest.raises(torch2ort.SchemaMismatchError) as error:
        exported(torch.randn(1001, 4))
    assert "expected a size (batch) from 0 to 1000, got 1001" in str(error.value)


def test_a_name_that_an_inferer_makes_up_is_in_the_graph():
    torch2ort.register_shape_inferer(Repeat, lambda node, shapes, dtypes: ([["rows", 4]], dtypes))
    assert output_of(export()) == ["rows", 4]


def test_one_name_is_one_size_in_two_functions():
    torch2ort.register_shape_inferer(Repeat, lambda node, shapes, dtypes: ([["rows", 4]], dtypes))
    model = Model(call=lambda x: Repeat.apply(x, 2) + Repeat.apply(-x, 2)).eval()
    exported = export(model)
    assert output_of(exported) == ["rows", 4]
    x = torch.randn(5, 4)
    torch.testing.assert_close(exported(x), model(x))


def test_an_expression_of_names_is_understood():
    torch2ort.register_shape_inferer(Repeat, lambda node, shapes, dtypes: ([["2*batch", 4]], dtypes))
    assert output_of(export()) == ["2*batch", 4]


def test_none_is_an_unknown_size():
    torch2ort.register_shape_inferer(Repeat, lambda node, shapes, dtypes: ([[None, 4]], dtypes))
    rows, columns = output_of(export())
    assert rows not in ("batch", "2*batch")
    assert columns == 4


def test_none_for_a_shape_takes_the_rank_from_a_run():
    torch2ort.register_shape_inferer(Repeat, lambda node, shapes, dtypes: ([None], dtypes))
    assert len(output_of(export())) == 2


@pytest.mark.parametrize(
    ("inferer", "sentence"),
    [
        (
            lambda node, shapes, dtypes: shapes[0],
            "returned [batch, 4]; expected a pair of lists, the shapes and the dtypes of the tensor outputs",
        ),
        (
            lambda node, shapes, dtypes: (shapes, []),
            "returned 1 shapes and 0 dtypes; expected one of each per tensor output",
        ),
        (
            lambda node, shapes, dtypes: (shapes * 2, dtypes * 2),
            "returned 2 shapes, but forward returns 1 tensors; expected one shape and one dtype per tensor "
            "output",
        ),
        (
            lambda node, shapes, dtypes: (shapes, ["float"]),
            "returned 'float' as the dtype of output 0; expected a torch.dtype such as torch.float32",
        ),
        (
            lambda node, shapes, dtypes: ([["a b", 4]], dtypes),
            "returned 'a b' for dimension 0 of output 0; expected a whole number from 0 up, a sympy "
            "expression, a "
            "name or expression of names such as '2*batch', or None for an unknown size",
        ),
        (
            lambda node, shapes, dtypes: ([[6, -4]], dtypes),
            "returned -4 for dimension 1 of output 0; expected a whole number from 0 up, a sympy "
            "expression, a name "
            "or expression of names such as '2*batch', or None for an unknown size",
        ),
        (
            lambda node, shapes, dtypes: ([4], dtypes),
            "returned 4 as the shape of output 0; expected a list of dimensions, or None for an unknown rank",
        ),
    ],
)
def test_a_malformed_answer_is_refused_at_export(inferer, sentence):
    assert refusal(inferer) == f"{NAME}: the shape inferer {sentence}"


@pytest.mark.parametrize(
    ("inferer", "sentence"),
    [
        (
            lambda node, shapes, dtypes: (repeat(node, shapes, dtypes)[0], [torch.float64]),
            "has dtype torch.float64, but forward returned torch.float32",
        ),
        (
            lambda node, shapes, dtypes: ([[8]], dtypes),
            "has 1 dimensions, [8], but forward returned 2, [6, 4], for inputs of [3, 4]",
        ),
        (
            lambda node, shapes, dtypes: (shapes, dtypes),
            "has size batch = 3 in dimension 0, but forward returned 6, for inputs of [3, 4]",
        ),
        (
            lambda node, shapes, dtypes: ([[shapes[0][0] * 2, 5]], dtypes),
            "has size 5 in dimension 1, but forward returned 4, for inputs of [3, 4]",
        ),
    ],
)
def test_an_answer_that_a_run_contradicts_is_refused_at_export(inferer, sentence):
    assert refusal(inferer) == f"{NAME}: the shape inferer says that output 0 {sentence}"


def test_an_inferers_exception_arrives_as_it_is():
    raised = KeyError("mine")

    def inferer(node, shapes, dtypes):
        raise raised

    torch2ort.register_shape_inferer(Repeat, inferer)
    with pytest.raises(KeyError) as error:
        export()
    assert error.value is raised


class OnlyMine(torch.autograd.Function):
    """Refuses data that an export makes up."""

    @staticmethod
    def forward(ctx, x):
        if not (x > 100).all():
            raise ValueError("not mine")
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class WritesUnseen(OnlyMine):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        OnlyMine.forward(ctx, x)
        return x.mul_(2)


class MarksUnseen(OnlyMine):
    @staticmethod
    def forward(x):
        return OnlyMine.forward(None, x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)


def same(node, shapes, dtypes):
    return shapes, dtypes


def test_a_forward_that_runs_on_the_samples_own_values_alone_exports():
    model = Model(call=lambda x: OnlyMine.apply(x.abs() + 101)).eval()
    exported = export(model)
    x = torch.randn(5, 4)
    torch.testing.assert_close(exported(x), model(x))


def test_a_sample_that_eager_refuses_is_refused_with_its_error():
    torch2ort.register_shape_inferer(OnlyMine, lambda node, shapes, dtypes: ([None], dtypes))
    with pytest.raises(ValueError, match=r"^not mine$"):
        export(Model(call=OnlyMine.apply))


def test_a_write_that_only_the_samples_values_show_is_seen():
    torch2ort.register_shape_inferer(WritesUnseen, same)
    model = Model(call=lambda x: WritesUnseen.apply(x.abs() + 101)).eval()
    exported = export(model)
    x = torch.randn(5, 4)
    with pytest.warns(
        torch2ort.Torch2OrtWarning, match=r"WritesUnseen: output 0 shares memory with argument 0"
    ):
        actual = exported(x)
    torch.testing.assert_close(actual, model(x))


def test_a_mark_that_only_the_samples_values_show_is_seen():
    torch2ort.register_shape_inferer(MarksUnseen, same)
    model = Model(call=lambda x: MarksUnseen.apply(x.abs() + 101)).eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(export(model)(x), model(x))


def test_a_declared_write_of_a_forward_that_nobody_can_run_is_right():
    torch2ort.register_shape_inferer(WritesUnseen, same)
    torch2ort.register_inplace_map(WritesUnseen, forward={0: 0})

    def call(x):
        hidden = x.abs() + 101
        return WritesUnseen.apply(hidden) + hidden

    model = Model(call=call).eval()
    exported = export(model)
    x = torch.randn(5, 4)
    torch.testing.assert_close(exported(x), model(x))


class Incumbent(torch.autograd.Function):
    """Its ``infer_shape`` is in the form of onnxruntime's ORTModule."""

    @staticmethod
    def forward(ctx, x, times):
        return torch.from_numpy(np.concatenate([x.detach().numpy()] * times, 1))

    @staticmethod
    def infer_shape(node, tensor_input_shapes, tensor_input_dtypes):
        assert node.op_type == "PythonOp"
        (times,) = [a.ints[0] for a in node.attribute if a.name == "input_int_scalars"]
        (rows, columns), (dtype,) = tensor_input_shapes[0], tensor_input_dtypes
        assert (type(rows), type(dtype)) == (str, int)
        return [[rows, columns * times]], [dtype]


def test_infer_shape_of_an_ortmodule_class_counts_as_registered():
    assert output_of(export(Model(call=lambda x: Incumbent.apply(x, 3)))) == ["batch", 12]


def test_a_registered_inferer_goes_before_infer_shape():
    torch2ort.register_shape_inferer(Incumbent, lambda node, shapes, dtypes: ([["rows", 12]], dtypes))
    assert output_of(export(Model(call=lambda x: Incumbent.apply(x, 3)))) == ["rows", 12]


def test_the_rule_serves_onnx_shape_inference_on_a_saved_file(tmp_path):
    torch2ort.register_shape_inferer(NAME, repeat)
    export(shapes=None).save(tmp_path / "model.onnx")
    model = ir.load(tmp_path / "model.onnx")
    for value in [v for node in model.graph for v in node.outputs]:
        value.shape = None
    model.graph.inputs[0].shape = ir.Shape(["rows", 4])
    infer_symbolic_shapes(model, warn_on_missing=False)
    node = next(n for n in model.graph if n.op_type == "PythonOp")
    assert [str(d) for d in node.outputs[1].shape] == ["2*rows", "4"]


def test_the_rule_refuses_an_inferer_that_contradicts_the_node(tmp_path):
    torch2ort.register_shape_inferer(NAME, repeat)
    export(shapes=None).save(tmp_path / "model.onnx")
    torch2ort.register_shape_inferer(NAME, lambda node, shapes, dtypes: ([[1]], dtypes), override=True)
    with pytest.raises(torch2ort.ShapeInferenceError) as error:
        infer(ir.load(tmp_path / "model.onnx"))
    assert str(error.value) == (
        f"{NAME}: the shape inferer says that output 0 has 1 dimensions, but the node says 2"
    )
