"""ONNX models train as the same model in PyTorch, or are refused by the operator's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.trainer.models import DESCRIPTION, batches, cross_entropy, options, started, trainer
from torch2ort.errors import ExportError, OptionError, UnsupportedOperatorError
from torch2ort.trainer import ORTTrainer, optim
from torch2ort.trainer.onnx_model import model as onnx_model


def network(opset: int = 14, last: str = "SoftmaxCrossEntropyLoss") -> onnx.ModelProto:
    """The small model and its loss, written node by node."""
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["hidden"], transB=1),
        helper.make_node("Tanh", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "last.weight", "last.bias"], ["logits"], transB=1),
        helper.make_node(last, ["logits", "label"], ["loss"], name="end"),
    ]
    weights = [
        numpy_helper.from_array(value.detach().numpy(), name) for name, value in started().named_parameters()
    ]
    graph = helper.make_graph(
        nodes, "network",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3]),
        ],
        weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def onnx_trainer(model: onnx.ModelProto, config: Any = None, **groups: Any) -> ORTTrainer:
    return ORTTrainer(model, DESCRIPTION, config or optim.SGDConfig(lr=0.5), options=options(**groups))


@pytest.mark.parametrize("opset", [12, 14, 21])
def test_an_onnx_model_trains_as_the_same_model_in_torch(opset: int) -> None:
    model = network(opset)
    before = model.SerializeToString()
    tried = onnx_trainer(model, utils={"frozen_weights": ["first.bias"]})
    expected = started()
    expected.first.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.5)
    for x, y in batches(20):
        loss = cross_entropy(expected(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(tried.train_step(x, y)[0], loss.detach())
    torch.testing.assert_close(tried.state_dict(pytorch_format=True), dict(expected.state_dict()))
    assert model.SerializeToString() == before


def test_the_trained_model_is_an_onnx_model_again(tmp_path: Path) -> None:
    tried = onnx_trainer(network())
    for x, y in batches(3):
        tried.train_step(x, y)
    tried.save_as_onnx(str(tmp_path / "trained.onnx"))
    saved = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in saved.graph.node] == [node.op_type for node in network().graph.node]
    found = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    ((x, y),) = batches(1, size=6)
    results = found.run(None, {"x": x.numpy(), "label": y.numpy()})
    torch.testing.assert_close([torch.from_numpy(np.array(v)) for v in results], list(tried.eval_step(x, y)))


class Attention(torch.nn.Module):
    """Sizes that are computed from sizes, an embedding, a mask, a constant that is not a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.both = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.norm(self.embedding(tokens)) + self.table[:length]
        query, key = self.both(x).reshape(batch, length, 2, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-1, -2)).masked_fill(torch.ones(length, length).triu(1).bool(), -1e4)
        found = (scores.softmax(-1) @ key).transpose(1, 2).reshape(batch, length, 8)
        return torch.nn.functional.gelu(found).mean(1)


def test_what_save_as_onnx_wrote_trains_on_with_its_weights_alone(tmp_path: Path) -> None:
    torch.manual_seed(4)
    description = {
        "inputs": [("tokens", ["batch", "length"]), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    model = Attention()
    data = [(torch.randint(0, 11, (n, m)), torch.randint(0, 8, (n,))) for n, m in ((3, 4), (2, 3))]
    first = ORTTrainer(model, description, optim.SGDConfig(lr=0.1), cross_entropy, options())
    first.eval_step(*data[0])
    first.save_as_onnx(str(tmp_path / "model.onnx"))
    saved = onnx.load(tmp_path / "model.onnx")
    second = ORTTrainer(saved, description, optim.SGDConfig(lr=0.1), options=options())
    assert set(second._parameters) == {name for name, _ in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens, label in data:
        loss = cross_entropy(model(tokens), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(second.train_step(tokens, label)[0], loss.detach())
    trained = second.state_dict(pytorch_format=True)
    torch.testing.assert_close(
        {name: trained[name] for name in second._parameters}, dict(model.named_parameters())
    )


def test_a_checkpoint_of_an_onnx_model_resumes_with_the_same_bits(tmp_path: Path) -> None:
    tried = onnx_trainer(network(), optim.AdamConfig(lr=0.05))
    *_, (x, y) = batches(2)
    tried.train_step(x, y)
    tried.save_checkpoint(tmp_path / "state")
    other = onnx_trainer(network(), optim.AdamConfig(lr=0.05))
    other.load_checkpoint(tmp_path / "state")
    assert torch.equal(other.train_step(x, y)[0], tried.train_step(x, y)[0])


def test_an_unknown_operator_is_refused_by_name() -> None:
    model = network()
    model.graph.node[1].op_type = "Hardmax"
    model.graph.node[1].name = "middle"
    with pytest.raises(UnsupportedOperatorError) as caught:
        onnx_trainer(model)
    assert str(caught.value).startswith(
        "The ONNX model has the operator Hardmax (node 'middle'), which is not trained; allowed are "
    )


def test_an_attribute_that_an_operator_has_not_is_refused() -> None:
    model = network()
    model.graph.node[0].attribute.append(helper.make_attribute("gamma", 2.0))
    model.graph.node[0].name = "start"
    with pytest.raises(UnsupportedOperatorError) as caught:
        onnx_trainer(model)
    assert str(caught.value) == (
        "The ONNX model's node 'start' (Gemm) is not trained: got an unexpected keyword argument 'gamma'. "
        "Export the model without it, or give the torch.nn.Module that it was made of."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inputs": DESCRIPTION["inputs"][::-1]},
            "model_desc describes the inputs ['label', 'x']; the ONNX model's are ['x', 'label']. Describe "
            "all of them, in their order.",
        ),
        (
            {"outputs": [("lost", [], True)]},
            "model_desc describes the outputs ['lost']; the ONNX model's are ['loss', 'logits']. Describe "
            "some of them, in their order.",
        ),
    ],
)
def test_a_description_of_another_model_is_refused(change: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        ORTTrainer(network(), {**DESCRIPTION, **change}, optim.SGDConfig(), options=options())
    assert str(caught.value) == message


def test_a_postprocess_changes_the_onnx_model() -> None:
    def without_loss_of_order(model: onnx.ModelProto) -> onnx.ModelProto:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.graph.node[1].op_type = "Sigmoid"
        return changed

    x, y = next(batches(1))
    given = {"_internal_use": {"extra_postprocess": without_loss_of_order}}
    expected = started()
    found = onnx_trainer(network(), **given).eval_step(x, y)
    torch.testing.assert_close(found[1], expected.last(torch.sigmoid(expected.first(x))).detach())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            None,
            "Option _internal_use.extra_postprocess is given with a torch.nn.Module; it changes an ONNX "
            "model alone. Change the module, or what save_as_onnx writes.",
        ),
        (
            network(),
            "Option _internal_use.extra_postprocess returned a NoneType; allowed is an onnx.ModelProto.",
        ),
    ],
)
def test_a_postprocess_that_cannot_be_is_refused(model: Any, message: str) -> None:
    groups = {"_internal_use": {"extra_postprocess": lambda model: None}}
    with pytest.raises(OptionError) as caught:
        trainer(**groups) if model is None else onnx_trainer(model, **groups)
    assert str(caught.value) == message


def test_a_module_that_differs_from_onnx_runtime_is_refused_before_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = onnx_trainer(network())
    before = tried.state_dict(pytorch_format=True)
    monkeypatch.setattr(onnx_model.OnnxModel, "proto", lambda self: _other())
    with pytest.raises(ExportError, match=r"^Output 'loss' of the ONNX model differs from ONNX Runtime's by"):
        tried.train_step(*next(batches(1)))
    torch.testing.assert_close(tried.state_dict(pytorch_format=True), before)


def _other() -> onnx.ModelProto:
    model = network()
    model.graph.node[1].op_type = "Sigmoid"
    return model
