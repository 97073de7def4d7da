"""Exports of training mode: plain ONNX in the file, eager's random numbers in a torch2ort session."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.support.sweeps import sample_cases
from tests.support.unary_op_model import Applied

SEED = 7


def operators(exported: torch2ort.ExportedModel) -> list[str]:
    """The operators of a graph in order, those of other domains with their domains, without constants."""
    names = [f"{n.domain}::{n.op_type}".removeprefix("::") for n in exported.proto.graph.node]
    return [name for name in names if name != "Constant"]


def fresh() -> nn.Module:
    """A new module, in PyTorch's default training mode."""
    return nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3), nn.Sigmoid(), nn.Dropout(), nn.BatchNorm1d(3))


def seeded(call: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The result of a call after seeding, and the state in which it leaves the generator."""
    torch.manual_seed(SEED)
    return call(*args), torch.get_rng_state()


def assert_calls_like_eager(
    model: nn.Module, *args: torch.Tensor, **bounds: float
) -> torch2ort.ExportedModel:
    """Export ``model`` and compare three calls with eager's: results, random state and buffers."""
    eager = copy.deepcopy(model)
    exported = torch2ort.export(model, args)
    for _ in range(3):
        expected, state = seeded(eager, *args)
        actual, left = seeded(exported, *args)
        torch.testing.assert_close(actual, expected, **bounds)
        assert torch.equal(left, state)
    buffers = {name: value for name, value in exported._weights.items() if value is not None}
    torch.testing.assert_close(buffers, {name: eager.get_buffer(name) for name in buffers}, **bounds)
    return exported


def plain(exported: torch2ort.ExportedModel, path: Path, *args: torch.Tensor) -> dict[str, torch.Tensor]:
    """The results of the saved file in a plain onnxruntime session, by the outputs' names."""
    exported.save(path)
    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    feeds = dict(zip((v.name for v in session.get_inputs()), (a.numpy() for a in args), strict=False))
    return {k: torch.from_numpy(v) for k, v in zip(names, session.run(names, feeds), strict=True)}


def test_a_fresh_module_is_operators_of_onnx() -> None:
    found = operators(torch2ort.export(fresh(), torch.randn(8, 6)))
    made = ["Gemm", "LayerNormalization", "Sigmoid", "Dropout", "BatchNormalization"]
    assert [name for name in found if name in made] == made
    assert [name for name in found if "::" in name] == []


def test_a_file_says_that_it_drops_and_normalizes_by_the_batch() -> None:
    proto = torch2ort.export(fresh(), torch.randn(8, 6)).proto
    onnx.checker.check_model(proto)
    nodes = {node.op_type: node for node in proto.graph.node}
    constants = {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in proto.graph.node
        if node.op_type == "Constant"
    }
    assert [constants[name].item() for name in nodes["Dropout"].input[1:]] == [0.5, True]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes["BatchNormalization"].attribute}
    assert attributes["training_mode"] == 1


def test_buffers_that_forward_updates_are_inputs_and_outputs_by_their_names() -> None:
    graph = torch2ort.export(fresh(), torch.randn(8, 6)).proto.graph
    state = ["4.running_mean", "4.running_var", "4.num_batches_tracked"]
    assert [value.name for value in graph.input] == ["input", *state]
    assert [value.name for value in graph.output] == ["output", *(f"{name}.updated" for name in state)]


def test_a_call_is_eagers_with_its_random_numbers() -> None:
    assert_calls_like_eager(fresh(), torch.randn(8, 6))


def test_the_models_own_buffers_stay() -> None:
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    torch2ort.export(model, torch.randn(8, 6))(torch.randn(8, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loaded_file_draws_eagers_numbers(tmp_path: Path) -> None:
    model, x = fresh(), torch.randn(8, 6)
    torch2ort.export(model, x).save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    torch.testing.assert_close(seeded(loaded, x), seeded(model, x))


def test_a_session_draws_eagers_numbers() -> None:
    model, x = fresh(), torch.randn(8, 6)
    session = torch2ort.export(model, x).session()
    actual, _ = seeded(lambda: session.run(["output"], {"input": x.numpy()})[0])
    torch.testing.assert_close(torch.from_numpy(actual), seeded(model, x)[0])


NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "one dimension": (nn.BatchNorm1d, (8, 3)),
    "sequences": (nn.BatchNorm1d, (4, 3, 5)),
    "images": (nn.BatchNorm2d, (4, 3, 5, 4)),
    "volumes": (nn.BatchNorm3d, (2, 3, 2, 5, 4)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "every batch alike": {"momentum": None},
    **{f"momentum {value}": {"momentum": value} for value in (0.0, 0.5, 1 / 3, 1.0)},
    "without weights": {"affine": False},
    "of another epsilon": {"eps": 0.1},
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("setting", sample_cases(SETTINGS, 2))
def test_running_statistics_of_a_plain_session_are_pytorchs(norm: str, setting: str, tmp_path: Path) -> None:
    make, shape = NORMS[norm]
    model, x = make(3, **SETTINGS[setting]), torch.randn(shape) * 2 + 1
    model(x - 3)
    found = plain(torch2ort.export(model, x), tmp_path / "model.onnx", x)
    expected = {"output": model(x).detach()}
    expected.update((f"{name}.updated", value) for name, value in model.named_buffers())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("setting", sample_cases(SETTINGS, 2, start=1))
def test_normalizations_by_the_batch_are_onnxs_operator(norm: str, setting: str) -> None:
    make, shape = NORMS[norm]
    exported = assert_calls_like_eager(make(3, **SETTINGS[setting]), torch.randn(shape))
    assert operators(exported).count("BatchNormalization") == 1


def test_statistics_of_two_rows_are_unbiased() -> None:
    assert_calls_like_eager(nn.BatchNorm1d(3, momentum=1 / 3), torch.randn(2, 3))


def test_a_norm_that_is_called_twice_updates_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.norm(x).exp())

    assert_calls_like_eager(Twice(), torch.randn(8, 3))


def test_a_running_variance_that_is_infinite_stays() -> None:
    model = nn.BatchNorm1d(3)
    model.running_var.fill_(math.inf)
    assert_calls_like_eager(model, torch.randn(8, 3))


def test_statistics_follow_a_batch_of_any_size() -> None:
    model = nn.BatchNorm1d(3)
    exported = torch2ort.export(model, torch.randn(8, 3), dynamic_shapes={"input": {0: "batch"}})
    for rows in (8, 2, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(exported(x), model(x))
    torch.testing.assert_close(exported._weights["running_var"], model.running_var)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_without_a_variance_is_refused(rows: int) -> None:
    exported = torch2ort.export(nn.BatchNorm1d(3), torch.randn(8, 3), dynamic_shapes={"input": {0: "batch"}})
    with pytest.raises(torch2ort.SchemaMismatchError) as refusal:
        exported(torch.randn(rows, 3))
    assert str(refusal.value) == (
        f"the call does not fit the exported model: input sizes [[{rows}, 3]]: expected size(0, 0) > 1, as "
        f"it was for the sample; export with a sample of these sizes"
    )


def test_an_image_of_one_pixel_has_no_instance_statistics() -> None:
    exported = torch2ort.export(
        nn.InstanceNorm1d(3), torch.randn(8, 3, 5), dynamic_shapes={"input": {2: "length"}}
    )
    with pytest.raises(torch2ort.SchemaMismatchError, match=r"expected size\(0, 2\) > 1, as it was"):
        exported(torch.randn(8, 3, 1))


def test_an_empty_batch_that_is_exported_leaves_the_statistics() -> None:
    assert_calls_like_eager(nn.BatchNorm1d(3), torch.randn(0, 3))


def test_a_batch_of_one_is_refused_as_eager_refuses_it() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        torch2ort.export(nn.BatchNorm1d(3), torch.randn(1, 3))


def test_a_convolution_keeps_its_normalization_by_the_batch(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 6, 6)
    found = plain(torch2ort.export(model, x), tmp_path / "model.onnx", x)
    torch.testing.assert_close(found["output"], model(x).detach())


BOUNDS = {torch.float16: {"rtol": 4e-3, "atol": 4e-3}, torch.bfloat16: {"rtol": 3e-2, "atol": 2e-2}}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (lambda: nn.BatchNorm2d(6), (4, 6, 5, 5)),
    "BatchNorm without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 5, 5)),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (4, 6, 5, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6), (4, 6, 5, 5)),
    "Dropout": (lambda: nn.Dropout(0.1), (4, 6)),
    "Dropout of nothing": (lambda: nn.Dropout(0.0), (4, 6)),
    "Dropout of everything": (lambda: nn.Dropout(1.0), (4, 6)),
    "Dropout in place": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3, inplace=True)), (4, 6)),
    "Dropout1d": (lambda: nn.Dropout1d(0.3), (4, 6, 5)),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), (4, 6, 5, 5)),
    "Dropout3d": (lambda: nn.Dropout3d(0.3), (4, 6, 2, 5, 5)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), (4, 6)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), (4, 6, 5, 5)),
    "an encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8), (4, 5, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_eagers_without_kernels_of_pytorch(name: str) -> None:
    make, shape = LAYERS[name]
    exported = assert_calls_like_eager(make(), torch.randn(shape))
    assert [found for found in operators(exported) if "::" in found] == []


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["BatchNorm", "Dropout", "Dropout2d", "AlphaDropout"])
def test_a_layer_in_half_precision_is_eagers(name: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    exported = assert_calls_like_eager(make().to(dtype), torch.randn(shape).to(dtype), **BOUNDS[dtype])
    assert [found for found in operators(exported) if "::" in found] == []


def test_dropout_in_half_precision_has_eagers_bits() -> None:
    assert_calls_like_eager(nn.Dropout(0.1), torch.randn(8, 6).half(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["BatchNorm", "Dropout"])
def test_a_layer_in_double_is_eagers(name: str) -> None:
    make, shape = LAYERS[name]
    assert_calls_like_eager(make().double(), torch.randn(shape, dtype=torch.float64))


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "several beside each other": lambda x: F.dropout(x) + F.dropout(x) + F.dropout(x.tanh(), 0.2),
    "between other draws": lambda x: torch.cat(
        [torch.rand_like(x), F.dropout(x.exp()), torch.randn_like(x), F.dropout1d(x[None], 0.3)[0]]
    ),
    "beside Functions": lambda x: torch.cat(
        [Noise.apply(x), F.dropout(x), Noise.apply(x), F.dropout(x, 0.2)]
    ),
    "one that is unused": lambda x: (F.dropout(x), F.dropout(x, 0.2))[1],
    "of a constant": lambda x: x * F.dropout(torch.ones(8, 6)),
    "of rows and columns exchanged": lambda x: F.dropout(x.transpose(0, 1), 0.3),
    "with its mask": lambda x: torch.native_dropout(x, 0.5, True),
    "of whole paths": lambda x: x * x.new_empty(8, 1).bernoulli_(0.7) / 0.7,
    "of attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
}


@pytest.mark.parametrize("name", CALLS)
def test_dropout_draws_in_eagers_order(name: str, tmp_path: Path) -> None:
    x = torch.randn(8, 6)
    model = Applied({name: CALLS[name]}).train()
    exported = assert_calls_like_eager(model, x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[Noise])
    torch.testing.assert_close(seeded(loaded, x), seeded(model, x))


RECURRENT: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, {"batch_first": True}),
    "RNN": (nn.RNN, {"bidirectional": True, "nonlinearity": "relu"}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_recurrent_layers_is_eagers(name: str) -> None:
    make, settings = RECURRENT[name]
    model = make(6, 4, num_layers=3, dropout=0.3, **settings)
    x = torch.randn(2, 5, 6)
    found, evaluated = (
        operators(assert_calls_like_eager(model, x)),
        operators(torch2ort.export(model.eval(), x)),
    )
    assert found.count("Dropout") == 2
    assert {name for name in found if "::" in name} == {name for name in evaluated if "::" in name}


def test_the_length_and_state_of_recurrent_layers_with_dropout_vary() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(6, 4, num_layers=2, dropout=0.3, bias=False)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
            return self.net(x, (h, h * 2))

    model = Net()
    exported = torch2ort.export(
        model, (torch.randn(5, 2, 6), torch.randn(2, 2, 4)), dynamic_shapes=({0: torch.export.Dim("n")}, None)
    )
    for length in (5, 7):
        args = torch.randn(length, 2, 6), torch.randn(2, 2, 4)
        torch.testing.assert_close(seeded(exported, *args), seeded(model, *args))


def test_dropout_of_a_channels_last_image_goes_to_eagers_elements() -> None:
    last = torch.channels_last
    model = nn.Sequential(nn.Conv2d(6, 3, 3).to(memory_format=last), nn.BatchNorm2d(3), nn.Dropout(0.3))
    assert_calls_like_eager(model, torch.randn(4, 6, 5, 5).to(memory_format=last))


def test_a_plain_session_drops_by_numbers_of_its_own(tmp_path: Path) -> None:
    found = plain(
        torch2ort.export(nn.Dropout(0.25), torch.ones(400, 5)), tmp_path / "m.onnx", torch.ones(400, 5)
    )
    assert found["output"].unique().tolist() == [0, pytest.approx(1 / 0.75)]
    assert (found["output"] == 0).float().mean() == pytest.approx(0.25, abs=0.05)


def rewritten(path: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    """Have another tool change a file."""
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)


def test_a_file_that_lost_what_a_node_draws_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch2ort.export(nn.Sequential(nn.Dropout(), nn.Tanh(), nn.Dropout()), torch.randn(3)).save(path)

    def change(graph: onnx.GraphProto) -> None:
        del next(node for node in graph.node if node.op_type == "Dropout").metadata_props[:]

    rewritten(path, change)
    with pytest.raises(torch2ort.ModelLoadError) as refusal:
        torch2ort.load(path)
    assert str(refusal.value) == (
        f'{path}: its nodes that draw eager\'s random numbers are ["Drawn_1"], and were ["Drawn_0", '
        f'"Drawn_1"] when it was saved: it was changed by another tool. Export the model again, or open it '
        f"in a plain onnxruntime.InferenceSession, which draws numbers of its own"
    )


def test_a_file_that_has_its_draws_in_another_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch2ort.export(Applied({"": lambda x: F.dropout(x) + F.dropout(x)}).train(), torch.randn(3)).save(path)

    def change(graph: onnx.GraphProto) -> None:
        nodes = sorted(graph.node, key=lambda node: ("Constant", "Dropout", "Add").index(node.op_type))
        first = next(i for i, node in enumerate(nodes) if node.op_type == "Dropout")
        nodes[first], nodes[first + 1] = nodes[first + 1], nodes[first]
        del graph.node[:]
        graph.node.extend(nodes)

    rewritten(path, change)
    with pytest.raises(torch2ort.ModelLoadError, match='are \\["Drawn_1", "Drawn_0"\\], and were'):
        torch2ort.load(path)


def test_a_file_may_draw_by_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch2ort.export(nn.Dropout(), torch.randn(3)).save(path)

    def change(graph: onnx.GraphProto) -> None:
        entry = next(p for node in graph.node for p in node.metadata_props if p.key == "torch2ort.drawn")
        entry.value = entry.value.replace("functions.Dropout", "functions.DropoutNoise")

    rewritten(path, change)
    with pytest.raises(torch2ort.ModelLoadError):
        torch2ort.load(path)


def test_sigmoid_is_exact_where_it_is_small() -> None:
    x = torch.tensor([-80.0, -40, -18, 0, 30, math.inf, -math.inf, math.nan])
    exported = torch2ort.export(nn.Sigmoid(), x)
    assert operators(exported) == ["Sigmoid"]
    torch.testing.assert_close(exported(x), torch.sigmoid(x), rtol=1e-6, atol=0, equal_nan=True)


def test_what_ormodule_exports_in_training_mode_is_plain_too() -> None:
    module = torch2ort.ORTModule(fresh())
    module(torch.randn(8, 6)).sum().backward()
    assert {"Dropout", "BatchNormalization"} <= set(operators(module.exported))


def test_what_ormodule_exported_draws_eagers_numbers() -> None:
    module, x = torch2ort.ORTModule(nn.Sequential(nn.Linear(6, 3), nn.Dropout())), torch.randn(8, 6)
    module(x)
    torch.testing.assert_close(seeded(module.exported, x), seeded(module.module, x))
