"""Stop-gradients as onnxruntime-training knows them."""

from __future__ import annotations

import onnx_ir as ir

from torch2ort.symbolics.stop_gradient import forget_stop_gradient, is_stop


def lower_stop_gradients(model: ir.Model) -> None:
    """Turn each ``torch2ort::StopGradient`` of ``model`` into the node at which ORT's gradient ends.

    onnxruntime-training ends the gradient at an ``org.pytorch.aten::ATen`` node with operator
    ``detach``, once the engine has registered that edge and an executor for it.
    """
    given = set(model.graph.inputs)
    for node in list(model.graph):
        if is_stop(node):
            (value,) = node.inputs
            if value in given:
                # ORT's builder differentiates every reader of a tensor that requires a gradient; where
                # gradients end it looks up from the second node on.
                before = ir.Node("", "Identity", [value], num_outputs=1, name=f"{node.name}_input")
                before.outputs[0].type, before.outputs[0].shape = value.type, value.shape
                model.graph.insert_before(node, before)
                node.replace_input_with(0, before.outputs[0])
            node.domain, node.op_type = "org.pytorch.aten", "ATen"
            node.attributes["operator"] = ir.AttrString("operator", "detach")
            node.attributes["overload_name"] = ir.AttrString("overload_name", "")
            model.opset_imports["org.pytorch.aten"] = 1
    forget_stop_gradient(model)
