"""Each optimizer as a graph of ONNX operators, compared with itself as a function of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torch2ort import optim
from torch2ort.training_files.lowered_step import lower_step
from torch2ort.training_files.onnx_target import plain_target
from torch2ort.training_files.step_graph import StepGraph

STEPS = 50
BIAS = [{"params": "bias", "weight_decay": 0.0, "lr": 0.02}]
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "SGD": optim.SGD(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, max_grad_value=0.5),
    "Adam": optim.Adam(lr=0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": optim.AdamW(lr=0.01, groups=BIAS, max_grad_norm=0.5),
    "Lamb": optim.Lamb(lr=0.01, groups=BIAS),
    "Adagrad": optim.Adagrad(lr=0.01, lr_decay=0.1, initial_accumulator_value=0.2),
    "Lion": optim.Lion(lr=0.01, groups=BIAS, max_grad_norm=0.5),
}


def first() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in (("weight", (4, 3)), ("bias", (3,)))
    }


def gradients(parameters: dict[str, Any], step: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {
        name: np.float32(0.3) * np.asarray(value) + generator.standard_normal(value.shape, np.float32)
        for name, value in parameters.items()
    }


def rate(step: int) -> np.ndarray:
    return np.array(0.01 * (1 + step % 3), np.float32)


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """All optimizers in one graph, so that it is translated once."""
    made = StepGraph(FakeTensorMode())
    lr = made.input("lr", (), torch.float32)
    for name, optimizer in OPTIMIZERS.items():
        parameters = first()
        leaves, structure = pytree.tree_flatten((parameters, parameters, optimizer.init(parameters)))
        inputs = [made.input(f"{name}.{i}", leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]

        def run(lr, *given, optimizer=optimizer, structure=structure):
            return pytree.tree_leaves(optimizer(*pytree.tree_unflatten(given, structure), lr))

        found = made.compute(run, [lr, *inputs])
        made.outputs.update({f"{name}.out.{i}": node for i, node in enumerate(found)})
    model = lower_step(made, plain_target(None, is_step=True), {}).file()
    assert {node.domain for node in model.graph.node} == {""}
    return onnxruntime.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_50_steps_of_the_graph_are_those_of_the_function(session, name):
    optimizer = OPTIMIZERS[name]
    parameters, kept = first(), optimizer.init(first())
    _, structure = pytree.tree_flatten((parameters, kept))
    now = [leaf.numpy() for leaf in pytree.tree_leaves((parameters, kept))]
    wanted = [f"{name}.out.{i}" for i in range(len(now))]
    zeros = {v.name: np.zeros(v.shape, np.float32) for v in session.get_inputs() if v.type == "tensor(float)"}
    zeros.update(
        {v.name: np.zeros(v.shape, np.int64) for v in session.get_inputs() if v.type == "tensor(int64)"}
    )
    for step in range(STEPS):
        given, state = pytree.tree_unflatten(now, structure)
        leaves = pytree.tree_leaves((given, gradients(given, step), state))
        feeds = {f"{name}.{i}": leaf for i, leaf in enumerate(leaves)}
        now = session.run(wanted, {**zeros, **feeds, "lr": rate(step)})
        own = {key: torch.from_numpy(value) for key, value in gradients(parameters, step).items()}
        parameters, kept = optimizer(parameters, own, kept, torch.from_numpy(rate(step)))
    for found, value in zip(now, pytree.tree_leaves((parameters, kept)), strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-5)
