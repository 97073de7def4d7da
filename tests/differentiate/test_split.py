"""Operators that the backward half of a step may contain."""

from __future__ import annotations

import re

import pytest
import torch

from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.split import Split
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP

TRACE = 'File "model.py", line 7, in forward\n    return strange(x)'


def joint(target, *args) -> Joint:
    """A Joint whose forward half returns its input; its backward half calls ``target`` on the gradient."""
    graph = torch.fx.Graph()
    value = torch.empty(2, 3)
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    called = graph.call_function(target, ([tangent] if args else tangent, *args))
    result = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, x))
    graph.output((x, result))
    for node in graph.nodes:
        node.meta = {"val": value, "stack_trace": TRACE}
    called.meta["val"] = [value] if args else value
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Joint(
        graph_module=module,
        inputs={x: 0},
        tangents={tangent: 0},
        outputs=(x,),
        written={},
        gradients={0: result},
        shared=frozenset(),
    )


@pytest.mark.parametrize(
    "graph",
    [
        joint(torch.ops.aten.rand_like.default),
        joint(torch.ops.aten.bernoulli.default),
        joint(DIFFERENTIABLE_PYTHON_OP, "site"),
    ],
    ids=["random numbers", "draws of the gradient", "a call of a Function"],
)
def test_what_would_move_the_generator_or_run_twice_is_refused_at_build(graph) -> None:
    message = re.escape(
        "the backward of model.py:7, in forward: return strange(x) draws random numbers or calls a "
        "Function's forward, which a training graph does not take. Put that part of the model into a "
        "torch.autograd.Function"
    )
    with pytest.raises(UnsupportedOperatorError, match=f"^{message}$"):
        Split(graph)


def test_other_operators_are_split() -> None:
    graph = joint(torch.ops.aten.neg.default)
    assert Split(graph).kept == tuple(graph.inputs)
