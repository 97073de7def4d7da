"""The order of nodes that frees memory early."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

from torch2ort.runtime.memory_saving_order import free_early

# Backward of two layers: the gradient of a layer's result propagates to its weight and the layer before.
BACKWARD = """
<ir_version: 8, opset_import: ["" : 18]>
backward (float[2,2] grad, float[2,2] x0, float[2,2] x1, float[2,2] w1)
    => (float[2,2] dx, float[2,2] dw0, float[2,2] dw1) {
    again = Relu (x1)
    turned = Transpose (w1)
    grad0 = MatMul (grad, turned)
    dx = Neg (grad0)
    dw0 = MatMul (x0, grad0)
    dw1 = MatMul (again, grad)
}
"""


def order_of(text: str) -> list[str]:
    model = onnx.parser.parse_model(text)
    free_early(model.graph)
    onnx.checker.check_model(model)
    return [node.output[0] for node in model.graph.node]


def test_a_weights_gradient_comes_before_the_layers_in_front_of_it():
    assert order_of(BACKWARD) == ["again", "dw1", "turned", "grad0", "dx", "dw0"]


def test_what_is_quickly_computed_comes_last_before_its_reader():
    text = """
    <ir_version: 8, opset_import: ["" : 18]>
    f (float[2] x) => (float[2] sum) {
        quick = Neg (x)
        a = Abs (x)
        b = Exp (a)
        sum = Add (quick, b)
    }
    """
    assert order_of(text) == ["a", "b", "quick", "sum"]


def test_a_node_whose_body_reads_a_value_stays_behind_it():
    text = """
    <ir_version: 8, opset_import: ["" : 18]>
    f (bool which, float[2] x) => (float[2] chosen) {
        outside = Exp (x)
        chosen = If (which) <
            then_branch = yes () => (float[2] y) { y = Neg (outside) },
            else_branch = no () => (float[2] n) { n = Identity (x) }
        >
    }
    """
    assert order_of(text) == ["outside", "chosen"]


@pytest.mark.parametrize("unread", ["left = Neg (x)", ""], ids=["with an unused node", "without"])
def test_no_node_is_lost(unread):
    text = f"""
    <ir_version: 8, opset_import: ["" : 18]>
    f (float[2] x) => (float[2] y) {{
        {unread}
        y = Exp (x)
    }}
    """
    assert sorted(order_of(text)) == sorted(["y", *(["left"] if unread else [])])
