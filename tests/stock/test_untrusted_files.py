"""An untrusted file runs registered Functions alone, and a damaged one ends in an error that names it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

import torch2ort
from tests.stock.models import Squares, plain_session, registered, run
from tests.support.functions import Square
from torch2ort.kernels.functions import AtenKernel, encode_call


def python_op(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.op_type == "PythonOp")
    return node


def change(path: Path, edit: Callable[[onnx.NodeProto], object]) -> None:
    """Rewrite the file with its PythonOp node edited."""
    model = onnx.load(path)
    edit(python_op(model))
    path.write_bytes(model.SerializeToString())


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def edit_site(node: onnx.NodeProto, **fields: object) -> None:
    (text,) = (a.s for a in node.attribute if a.name == "site")
    set_attribute(node, "site", json.dumps({**json.loads(text), **fields}))


NAMES = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.load",
    "stranger.Evil",
    "",
    "a\x00b",
    "☃.Snow",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_nobody_registered_is_refused_and_nothing_is_imported(saved, tmp_path, monkeypatch, name):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    change(saved, lambda node: set_attribute(node, "func_name", name))
    with registered(Square):
        with pytest.raises(torch2ort.FunctionNotFoundError) as caught:
            torch2ort.load(saved)
        with pytest.raises(Exception, match="FunctionNotFoundError"):
            plain_session(str(saved))
    assert str(caught.value) == (
        f"the model calls 1 Function(s) that were not supplied: {name}. Pass the classes to "
        f"torch2ort.load(path, functions=[...]) or register them with torch2ort.register_function"
    )
    assert "stranger" not in sys.modules


def test_addresses_in_a_file_are_not_looked_at(saved):
    expected = torch2ort.load(saved, functions=[Square])(torch.ones(2, 4))

    def edit(node):
        set_attribute(node, "input_pointer_scalars", [1, 0xDEADBEEF])
        set_attribute(node, "input_pointer_scalar_positions", [0, 1])

    change(saved, edit)
    with registered(Square):
        torch.testing.assert_close(torch2ort.load(saved)(torch.ones(2, 4)), expected)
        torch.testing.assert_close(run(plain_session(str(saved)), torch.ones(2, 4))[0], expected)


def test_a_key_in_a_file_reaches_no_site_of_this_process(saved):
    torch2ort.export(Squares().eval(), torch.ones(2, 4)).session()
    change(saved, lambda node: set_attribute(node, "site_key", "PythonOp_0"))
    with (
        registered(Square),
        pytest.raises(Exception, match="the site_key 'PythonOp_0' is of no session") as caught,
    ):
        plain_session(str(saved))
    assert "PythonOp tests.support.functions.Square (node 'PythonOp_0')" in str(caught.value)


def kernel_node(node: onnx.NodeProto, call: str) -> None:
    set_attribute(node, "func_name", f"{AtenKernel.__module__}.{AtenKernel.__qualname__}")
    arguments = [{"str": call}, "tensor"]
    set_attribute(node, "input_convention", "cd")
    set_attribute(node, "input_requires_grads", [0, 0])
    edit_site(node, arguments=arguments, needs_input_grad=[False, False], kept=[], returns_tuple=True)


def call_of(operator: str, *arguments: object) -> str:
    record = {"operator": operator, "arguments": [{"tensor": 0}, *arguments], "keywords": {}, "random": False}
    return json.dumps(record)


def reading(path: str) -> str:
    record = {"operator": "from_file", "arguments": [path, False, 16], "keywords": {}, "random": False}
    return json.dumps(record)


MORE = "which no file may call, as it does more than calculate with tensors"
REFUSED = {
    "save": (call_of("save", "PATH"), MORE),
    "from_file": (reading("PATH"), "which no exported graph may call"),
    "set_": (call_of("set_.source_Tensor", {"tensor": 0}), "which no exported graph may call"),
    "mul_": (call_of("mul_.Tensor", {"tensor": 0}), "which no exported graph may call"),
    "segment_reduce": (call_of("segment_reduce", "sum"), MORE),
    "manual_seed": (call_of("manual_seed"), MORE),
    "is_same_size": (call_of("is_same_size", {"tensor": 0}), MORE),
    "no operator": (call_of("no_such_operator"), "not a call of an ATen operator"),
    "no call": ("[]", "not a call of an ATen operator"),
    "no text": ("{", "not a call of an ATen operator"),
}


@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_operators_that_do_more_than_calculate_are_refused(saved, tmp_path, call, reason):
    target = tmp_path / "written"
    change(saved, lambda node: kernel_node(node, call.replace("PATH", str(target))))
    with pytest.raises(torch2ort.ModelLoadError, match=reason):
        torch2ort.load(saved)
    with pytest.raises(Exception, match=f"ModelLoadError: .*{reason}"):
        plain_session(str(saved))
    assert not target.exists()


def test_a_kernel_that_calculates_needs_no_registration(saved):
    text = encode_call(torch.ops.aten.cumsum.default, [{"tensor": 0}, 1], {}, random=False)
    weights = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy())
        for t in onnx.load(saved).graph.initializer
    }
    change(saved, lambda node: kernel_node(node, text))
    x = torch.randn(2, 4)
    linear = torch.nn.functional.linear(x, weights["linear.weight"], weights["linear.bias"])
    torch.testing.assert_close(torch2ort.load(saved)(x), linear.cumsum(1))
    torch.testing.assert_close(run(plain_session(str(saved)), x)[0], linear.cumsum(1))


def test_data_outside_of_the_files_folder_is_refused(saved, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(64))
    inner = tmp_path / "inner"
    inner.mkdir()
    for location in ("../secret.bin", str(secret)):
        model = onnx.load(saved)
        (weight,) = (t for t in model.graph.initializer if t.name == "linear.weight")
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        path = inner / "model.onnx"
        path.write_bytes(model.SerializeToString())
        with pytest.raises(torch2ort.ModelLoadError, match=str(path)):
            torch2ort.load(path, functions=[Square])


WRONG = {
    "no site": lambda node: set_attribute(node, "site", None),
    "no JSON": lambda node: set_attribute(node, "site", "{"),
    "a list": lambda node: set_attribute(node, "site", "[]"),
    "a version of the future": lambda node: edit_site(node, version=99),
    "an argument of no kind": lambda node: edit_site(node, arguments=[{"pickle": "gASVAAA="}]),
    "no arguments": lambda node: edit_site(node, arguments=[]),
    "a dtype that is none": lambda node: edit_site(node, inputs=[["load", 2]]),
    "another dtype": lambda node: edit_site(node, inputs=[["float64", 2]]),
    "another output": lambda node: edit_site(node, tensors=[["int64", 2]]),
    "one output more": lambda node: edit_site(
        node, outputs=["tensor", "tensor"], tensors=[["float32", 2]] * 2, returns_tuple=True
    ),
    "a site that is a number": lambda node: set_attribute(node, "site", 3),
    "a name that is a number": lambda node: set_attribute(node, "func_name", 3),
    "no element types": lambda node: set_attribute(node, "output_tensor_types", None),
    "element types as text": lambda node: set_attribute(node, "output_tensor_types", "1"),
    "an element type that is none": lambda node: set_attribute(node, "output_tensor_types", [99]),
    "a huge element type": lambda node: set_attribute(node, "output_tensor_types", [2**40 + 1]),
    "other element types": lambda node: set_attribute(node, "output_tensor_types", [11]),
    "a negative rank": lambda node: set_attribute(node, "output_tensor_ranks", [-5]),
    "a huge rank": lambda node: set_attribute(node, "output_tensor_ranks", [2**40]),
    "one rank more": lambda node: set_attribute(node, "output_tensor_ranks", [2, 2]),
    "an input more": lambda node: node.input.append(node.input[0]),
    "no input": lambda node: node.input.pop(),
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_attribute_is_an_error_in_a_plain_session(saved, edit):
    change(saved, edit)
    with registered(Square), pytest.raises(Exception, match="PythonOp"):
        plain_session(str(saved))


def test_messages_name_the_function_and_what_is_wrong(saved):
    change(saved, lambda node: edit_site(node, inputs=[["float64", 2]]))
    with registered(Square), pytest.raises(Exception, match="input 0") as caught:
        plain_session(str(saved))
    assert str(caught.value).endswith(
        "PythonOp tests.support.functions.Square (node 'PythonOp_0'): input 0 is a tensor of float32 in the "
        "graph, but its site was exported with float64; export the model again"
    )


def test_a_class_that_changed_since_is_named(saved):
    name = f"{Square.__module__}.{Square.__qualname__}"

    def changed_forward(ctx, x, new):
        return x

    def fewer(ctx):
        return None

    for forward, given in ((changed_forward, "(ctx, x, new)"), (fewer, "(ctx)")):
        changed = type("Square", (torch.autograd.Function,), {"forward": staticmethod(forward)})
        torch2ort.register_function(changed, name)
        try:
            with pytest.raises(torch2ort.ModelLoadError) as caught:
                torch2ort.load(saved)
            with pytest.raises(Exception, match="the model calls it with 1 arguments"):
                plain_session(str(saved))
        finally:
            torch2ort.unregister(name)
        assert f"PythonOp {name}: the model calls it with 1 arguments, but " in str(caught.value)
        assert f".forward{given} does not accept them" in str(caught.value)
        assert str(caught.value).startswith(str(saved))
