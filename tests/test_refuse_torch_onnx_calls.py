"""Calls in the style of torch.onnx.export work, or are refused with the call to write instead."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.export import Dim

import torch2ort
from tests.support.functions import Square


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.layer(x))


class Sum(torch.nn.Module):
    def forward(self, x, y):
        return Square.apply(x[:, 1:]).sum(1) + y


X, Y = torch.ones(3, 4), torch.ones(3)


def sizes_of_inputs(exported):
    return [
        [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in exported.proto.graph.input
    ]


def refusal(kind, call):
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ({"x": {0: "batch"}, "y": {0: "batch"}}, [["batch", 4], ["batch"]]),
        ({"x": ["batch", None], "y": ["batch"]}, [["batch", 4], ["batch"]]),
        ((("batch", 4), ("batch",)), [["batch", 4], ["batch"]]),
        ({"x": {0: "batch", 1: Dim("seq", min=3)}, "y": {-1: "batch"}}, [["batch", "seq"], ["batch"]]),
        ({"x": {0: "batch", 1: Dim.STATIC}, "y": [Dim("batch")]}, [["batch", 4], ["batch"]]),
    ],
)
def test_names_stand_for_sizes(shapes, sizes):
    exported = torch2ort.export(Sum(), (X, Y), dynamic_shapes=shapes)
    assert sizes_of_inputs(exported) == sizes
    x, y = torch.randn(7, 4), torch.randn(7)
    torch.testing.assert_close(exported(x, y), Sum()(x, y))


def test_automatic_sizes_find_their_bounds():
    exported = torch2ort.export(Sum(), (X, Y), dynamic_shapes={"x": {0: "n", 1: Dim.AUTO}, "y": {0: "n"}})
    x, y = torch.randn(7, 9), torch.randn(7)
    torch.testing.assert_close(exported(x, y), Sum()(x, y))


def test_sizes_of_two_names_that_have_to_be_equal_are_refused_with_what_to_write():
    message = refusal(
        torch2ort.ExportError,
        lambda: torch2ort.export(Sum(), (X, Y), dynamic_shapes={"x": {0: "batch"}, "y": {0: "other"}}),
    )
    assert message == (
        "Sum: torch.export failed: Constraints violated (other)!\n"
        "  - The values of other = size(1, 0) and batch = size(0, 0) must always be equal.\n"
        "Suggested fixes:\n"
        "  other = batch\n"
        "In dynamic_shapes use one name for sizes that are equal, and give a size its bounds, as in "
        "torch.export.Dim('batch', min=2, max=512). Or pass torch.export.Dim.AUTO, which infers both; calls "
        "with other sizes are then refused"
    )


OF_X = "dynamic_shapes for 'x', a tensor of shape [3, 4]: expected None, a dict such as {0: 'batch'}, or one "


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": "batch"}, f"{OF_X}entry for each of its 2 dimensions, got 'batch'"),
        ({"x": {2: "batch"}}, f"{OF_X}entry for each of its 2 dimensions, got {{2: 'batch'}}"),
        ({"x": ["batch"]}, f"{OF_X}entry for each of its 2 dimensions, got ['batch']"),
        (
            {"x": {0: "batch size"}},
            "dynamic_shapes for 'x': 'batch size' names a size and has to be a name as Python has them "
            "(letters, digits and _); write 'batch_size'",
        ),
        (
            "batch",
            "dynamic_shapes is 'batch'; expected a dict by the names of the arguments, such as "
            "{'x': {0: 'batch'}}, or a sequence in their order",
        ),
    ],
)
def test_what_says_nothing_of_a_tensors_sizes_is_refused(shapes, message):
    assert message == refusal(
        torch2ort.ExportError, lambda: torch2ort.export(Linear(), X, dynamic_shapes=shapes)
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (
            ("model.onnx",),
            {},
            "export does not take a path as torch.onnx.export does. Write "
            "torch2ort.export(model, sample).save('model.onnx')",
        ),
        (
            (),
            {"dynamic_axes": {"x": {0: "batch"}, "output": {0: "batch"}}},
            "export does not take dynamic_axes as torch.onnx.export does. Write "
            "torch2ort.export(model, sample, dynamic_shapes={'x': {0: 'batch'}})",
        ),
        (
            (),
            {
                "f": "model.onnx",
                "input_names": ["input"],
                "output_names": ["logits"],
                "dynamic_axes": {"input": [0], "logits": [0]},
                "opset_version": 20,
                "dynamo": True,
            },
            "export does not take f, input_names, output_names, dynamic_axes and opset_version as "
            "torch.onnx.export does. export has no dynamo (torch.export is always used). Write "
            "torch2ort.export(model, sample, dynamic_shapes={'x': {0: 'input_0'}}, opset=20)"
            ".renamed({'x': 'input', 'output': 'logits'}).save('model.onnx')",
        ),
        (
            (3,),
            {},
            "export takes two arguments by position, a model and a sample, and got 3 after them; pass that "
            "by its name",
        ),
    ],
)
def test_arguments_of_torch_onnx_get_the_call_to_write(arguments, settings, message):
    assert message == refusal(
        torch2ort.ExportError, lambda: torch2ort.export(Linear(), X, *arguments, **settings)
    )


def test_the_call_that_is_to_be_written_does_what_was_asked_for(tmp_path):
    message = refusal(
        torch2ort.ExportError,
        lambda: torch2ort.export(
            Linear(),
            X,
            f=tmp_path / "model.onnx",
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}},
        ),
    )
    eval(message.partition("Write ")[2], {"torch2ort": torch2ort, "model": Linear(), "sample": X})
    graph = torch2ort.load(tmp_path / "model.onnx", functions=[Square]).proto.graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["input", "logits"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_an_argument_that_nobody_has_is_pythons_error():
    assert "unexpected keyword argument 'sizes'" in refusal(
        TypeError, lambda: torch2ort.export(Linear(), X, sizes=3)
    )


@pytest.mark.parametrize("name", ["export", "export_training"])
def test_options_by_position_are_refused_with_the_call_to_write(name):
    message = refusal(
        torch2ort.OptionError, lambda: getattr(torch2ort, name)(Linear(), X, torch2ort.Options())
    )
    assert message == (
        f"{name} takes its options by name; write torch2ort.{name}(model, sample, "
        f"options=torch2ort.Options(...))"
    )


def test_the_mode_of_torch_onnx_is_no_mode():
    message = refusal(
        torch2ort.ExportError,
        lambda: torch2ort.export(Linear(), X, training=torch.onnx.TrainingMode.EVAL),
    )
    assert message == (
        "export: training is <TrainingMode.EVAL: 0>; expected True, False, or None for the model's own mode"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize(("model", "sample"), [(Linear(), [X]), (Sum(), [X, Y])])
def test_a_list_in_the_place_of_a_tuple_is_named_behind_the_error(model, sample):
    with pytest.raises(TypeError) as raised:
        torch2ort.export(model, sample)
    assert raised.value.__notes__ == [
        "The sample is a list, which is one argument of forward. If its entries are the arguments, pass a "
        "tuple: torch2ort.export(model, tuple(sample))"
    ]


def test_a_model_that_takes_a_list_gets_it():
    class Stack(torch.nn.Module):
        def forward(self, parts):
            return Square.apply(torch.stack(parts))

    torch.testing.assert_close(torch2ort.export(Stack(), [X, X])([X, X]), Stack()([X, X]))
