"""Inputs of a graph that donation nodes replace, and the ownership of their memory."""

from __future__ import annotations

import gc
import weakref

import onnx
import pytest
import torch

from torch2ort.pythonop.native import native
from torch2ort.runtime.donation import donate_inputs
from torch2ort.runtime.ortvalues import to_capsule


def graph() -> onnx.GraphProto:
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, None]) for name in "abcd"]
    nodes = [onnx.helper.make_node("Add", ["a", "c"], ["sum"])]
    outputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("sum", "d")
    ]
    return onnx.helper.make_graph(nodes, "graph", inputs, outputs)


def test_what_is_read_or_returned_has_a_node_with_its_number():
    made = graph()
    donate_inputs(made, ["b", "d", "c"])
    assert [value.name for value in made.input] == ["a"]
    numbers = {n.output[0]: n.attribute[0].ints[0] for n in made.node if n.op_type == "Donated"}
    assert numbers == {"d": 1, "c": 2}


def donated_to(run: native.Run) -> weakref.ref[torch.UntypedStorage]:
    tensor = torch.ones(3)
    run.donate([to_capsule(tensor)])
    return weakref.ref(tensor.untyped_storage())


@pytest.mark.parametrize(
    "end", [lambda run: run.clear(), lambda run: run.donate([])], ids=["cleared", "others"]
)
def test_a_run_drops_what_no_node_took(end):
    run = native.Run()
    storage = donated_to(run)
    assert storage() is not None
    end(run)
    gc.collect()
    assert storage() is None


def test_a_run_that_goes_drops_what_it_owns():
    storage = donated_to(native.Run())
    gc.collect()
    assert storage() is None


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match="PyCapsule"):
        native.Run().donate([object()])
