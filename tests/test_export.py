"""Exports: references to the model, contents of the graph, and refusals."""

from __future__ import annotations

import copy
import gc
import queue
import threading
import weakref

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Affine, Constants, Derived, Numpy, Square, scaled

bound_apply = Square.apply


class Calls(torch.nn.Module):
    """Applies each of the given calls in turn to a linear layer's output."""

    def __init__(self, *calls) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.calls = calls

    def forward(self, x):
        x = self.layer(x)
        for call in self.calls:
            x = call(x)
        return x


def nodes_of(exported, op_type="PythonOp"):
    return [node for node in exported.proto.graph.node if node.op_type == op_type]


def attribute(node, name):
    return onnx.helper.get_node_attr_value(node, name)


def test_each_call_becomes_one_python_op_node_with_its_qualified_name():
    exported = torch2ort.export(Calls(Square.apply, Derived.apply, Square.apply), torch.randn(2, 4))
    names = [
        "tests.support.functions.Square",
        "tests.support.functions.Derived",
        "tests.support.functions.Square",
    ]
    assert [attribute(node, "func_name").decode() for node in nodes_of(exported)] == names
    assert {node.domain for node in nodes_of(exported)} == {"com.microsoft"}
    assert [site.func_name for site in exported.python_ops] == names
    assert [site.node_name for site in exported.python_ops] == [node.name for node in nodes_of(exported)]


def test_a_bound_apply_is_caught():
    exported = torch2ort.export(Calls(bound_apply), torch.randn(2, 4))
    assert [site.function for site in exported.python_ops] == [Square]


def test_two_classes_of_one_name_are_numbered():
    twice, thrice = scaled(2.0), scaled(3.0)
    exported = torch2ort.export(Calls(twice.apply, thrice.apply, twice.apply), torch.randn(2, 4))
    name = f"tests.support.functions.{twice.__qualname__}"
    assert [site.func_name for site in exported.python_ops] == [name, f"{name}#2", name]


def test_constants_keep_value_and_type():
    exported = torch2ort.export(Calls(lambda x: Constants.apply(x, *Constants.EXPECTED)), torch.randn(2, 4))
    (site,) = exported.python_ops
    assert site.arguments == dict(enumerate(Constants.EXPECTED, 1))
    assert [type(v) for v in site.arguments.values()] == [type(v) for v in Constants.EXPECTED]


def test_the_proto_passes_the_checker_and_has_the_asked_opset():
    for opset in (18, 20, 21):
        exported = torch2ort.export(Calls(Square.apply), torch.randn(2, 4), opset=opset)
        onnx.checker.check_model(exported.proto, full_check=True)
        assert {o.domain: o.version for o in exported.proto.opset_import}[""] == opset
        assert exported.proto.ir_version <= 10


def test_inputs_and_outputs_have_the_users_names():
    class Named(torch.nn.Module):
        def forward(self, query, *, past, scale=2.0):
            return {"logits": query * scale, "past": [p + 1 for p in past]}

    sample = {"query": torch.randn(2), "past": (torch.randn(3), torch.randn(4))}
    exported = torch2ort.export(Named(), sample)
    assert [v.name for v in exported.proto.graph.input] == ["query", "past_0", "past_1"]
    assert [v.name for v in exported.proto.graph.output] == ["logits", "past_0_out", "past_1_out"]


def test_an_input_named_like_a_parameter_keeps_both():
    class Clash(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, weight):
            return weight * self.weight

    model, x = Clash(), torch.randn(3)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_process_are_as_before(fails):
    def boom(x):
        if fails:
            raise KeyError("from the model")
        return x

    model = torch.nn.Sequential(Calls(Square.apply, boom), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    apply = torch.autograd.Function.apply
    if fails:
        with pytest.raises(KeyError, match="from the model"):
            torch2ort.export(model, torch.randn(3, 4), training=False)
    else:
        x = torch.randn(3, 4)
        state = torch.get_rng_state()
        torch2ort.export(model, x, training=False)
        assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert torch.autograd.Function.apply == apply
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_exception_of_the_model_arrives_as_the_same_object():
    error = ValueError("mine")

    def boom(x):
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        torch2ort.export(Calls(boom), torch.randn(2, 4))
    assert caught.value is error


RAISED_OTHERWISE_IN_A_TRACE = {
    "a view of no view's strides": lambda x: x.t().view(12),
    "a view of parts": lambda x: x[:, 1:].view(9),
    "the size in the text": lambda x: undecided(x),
}


def undecided(x):
    raise ValueError(f"{type(x).__name__} of {tuple(x.shape)}")


@pytest.mark.parametrize("body", RAISED_OTHERWISE_IN_A_TRACE.values(), ids=RAISED_OTHERWISE_IN_A_TRACE)
def test_what_eager_raises_too_is_raised_as_eager_raises_it(body):
    x = torch.randn(3, 4)
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever eager PyTorch raises
        body(x)
    with pytest.raises(type(expected.value)) as caught:
        torch2ort.ORTModule(Calls(body))(x)
    assert type(caught.value) is type(expected.value)
    assert str(caught.value) == str(expected.value)
    assert caught.value.__cause__ is None


def test_a_run_that_finds_eagers_error_leaves_no_trace():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.calls = []

        def forward(self, x):
            self.calls.append(1)
            self.seen.add_(1)
            x.mul_(2)
            return x.t().view(12)

    model, x = Counts(), torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch2ort.export(model, x)
    assert model.calls == []
    assert model.seen.item() == 0
    assert torch.equal(x, torch.ones(3, 4))


def test_an_exception_of_forward_arrives_as_the_same_object():
    error = ValueError("mine")

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        torch2ort.export(Calls(Broken.apply), torch.randn(2, 4))
    assert caught.value is error


def test_tensors_inside_a_list_argument_are_refused():
    class Listed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, others):
            return x + others[0]

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Calls(lambda x: Listed.apply(x, [x])), torch.randn(2, 4))
    name = f"{Listed.__module__}.{Listed.__qualname__}"
    assert str(caught.value) == (
        f"{name}: argument 1 is a list with tensors in it; autograd does not see those, and neither can a "
        f"graph. "
        f"Pass the tensors as arguments of their own"
    )


def test_what_is_no_module_is_refused():
    with pytest.raises(torch2ort.ExportError) as raised:
        torch2ort.export(lambda x: x, torch.ones(2))
    assert str(raised.value) == "export: expected a torch.nn.Module, got function"


def test_a_branch_on_a_tensors_value_is_refused_with_its_line():
    def branch(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(
        torch2ort.ExportError, match=r"depends on a value inside a tensor at .*test_export\.py:\d+"
    ) as caught:
        torch2ort.export(Calls(branch), torch.randn(2, 4))
    assert "Use torch.where instead of the branch" in str(caught.value)


def test_a_model_whose_export_fails_is_let_go():
    model = Calls(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(torch2ort.ExportError, match="depends on a value inside a tensor"):
        torch2ort.export(model, torch.randn(2, 4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_other_threads_call_functions_as_usual_during_an_export():
    # A queue: an item that forward appends to a list would be removed again.
    seen = queue.SimpleQueue()

    def call_elsewhere(x):
        def elsewhere():
            y = torch.randn(2, requires_grad=True)
            seen.put(type(Square.apply(y).grad_fn).__name__)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x

    torch2ort.export(Calls(call_elsewhere, Square.apply), torch.randn(2, 4))
    assert {seen.get() for _ in range(seen.qsize())} == {"SquareBackward"}


def test_dynamic_sizes_come_out_as_symbols():
    exported = torch2ort.export(
        Calls(lambda x: torch.cat([Square.apply(x), x])),
        torch.randn(3, 4),
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
    )
    (value,) = exported.proto.graph.input
    assert value.type.tensor_type.shape.dim[0].dim_param
    x = torch.randn(7, 4)
    assert exported(x).shape == (14, 4)


class OfAll(torch.nn.Module):
    def forward(self, *parts):
        return sum(parts)


ROWS = torch.export.Dim("rows")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ({0: ROWS, 2: None},),
            f"dynamic_shapes for 'parts': expected None, a mapping or a sequence of 2 entries like the "
            f"argument itself (tuple), got { ({0: ROWS, 2: None})!r}",
        ),
        (
            ([{0: ROWS}],),
            f"dynamic_shapes for 'parts': expected None, a mapping or a sequence of 2 entries like the "
            f"argument itself (tuple), got {[{0: ROWS}]!r}",
        ),
        (
            (None, {0: ROWS}),
            "dynamic_shapes has 2 entries for a call with 1 arguments (parts); give one for each",
        ),
        (
            {"whole": {0: ROWS}},
            "dynamic_shapes names 'whole', which is not an argument of the call; expected some of ['parts']",
        ),
    ],
)
def test_dynamic_shapes_that_do_not_fit_the_arguments_are_refused(shapes, message):
    with pytest.raises(torch2ort.ExportError) as raised:
        torch2ort.export(OfAll(), (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=shapes)
    assert str(raised.value) == message


def test_dynamic_shapes_are_nested_like_the_arguments():
    each = {0: ROWS}
    exported = torch2ort.export(OfAll(), (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=((each, each),))
    torch.testing.assert_close(exported(torch.ones(5, 3), torch.ones(5, 3)), torch.full((5, 3), 2.0))


def test_a_numpy_body_exports_with_rank_and_dtype():
    model, x = Calls(Numpy.apply), torch.randn(2, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x))


def test_a_function_of_a_tensor_and_a_parameter():
    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        def forward(self, x):
            return Affine.apply(x, self.weight)

    model, x = Weighted(), torch.randn(2, 4)
    exported = torch2ort.export(model, x)
    assert attribute(nodes_of(exported)[0], "input_requires_grads") == [0, 1]
    torch.testing.assert_close(exported(x), model(x))


def test_a_layer_norm_in_float16_is_plain_onnx_within_the_bounds() -> None:
    model = torch.nn.LayerNorm(64).half()
    torch.nn.init.normal_(model.weight, 1, 0.2)
    x = (torch.randn(16, 64) * 3 + 1).half()
    exported = torch2ort.export(model.eval(), x)
    assert [node.domain + node.op_type for node in exported.proto.graph.node] == ["LayerNormalization"]
    torch.testing.assert_close(exported(x), model(x), rtol=4e-3, atol=1e-3)
