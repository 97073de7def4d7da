"""Measured times decide which library computes an operator; a step equals eager PyTorch's either way."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.differentiate.test_fuse_regions import Of, step
from tests.support.interpreted_regions import interpret
from tests.support.sweeps import sample_cases
from torch2ort._torch.aot import FakeTensorMode
from torch2ort.autotune import calibration, microbenchmark, tuner
from torch2ort.autotune import hardware_key as machines
from torch2ort.autotune.alternatives import (
    ALTERNATIVES,
    BETWEEN_LIBRARIES,
    KERNEL,
    Alternative,
    Rewriting,
)
from torch2ort.autotune.microbenchmark import AGAIN, RULE
from torch2ort.autotune.processor_rule import KINDS
from torch2ort.autotune.tuner import Tuner, winner
from torch2ort.cache.store.store import Store
from torch2ort.differentiate import step_target
from torch2ort.errors import Torch2OrtWarning
from torch2ort.options import Options
from torch2ort.training import plan_builder
from torch2ort.training.ort_targets import target_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Set up a process without measurements or a processor's rule, in which no operator is too small."""
    monkeypatch.setattr(calibration, "faster_in_kernels", frozenset)
    monkeypatch.setattr(tuner, "_KNOWN", tuner._Known())
    monkeypatch.setattr(tuner, "LARGE", 0)


def faster(name: str):
    """A clock by which the alternative of that name takes half of the time."""
    return lambda found: {way: 0.5 if way == name else 1.0 for way in found}


def never(found):
    raise AssertionError("something was measured")


@pytest.fixture
def fastest(monkeypatch, caplog):
    """Set the name of the alternative that is measured to be the fastest; return the log."""

    def choose(name: str) -> pytest.LogCaptureFixture:
        monkeypatch.setattr(microbenchmark, "interleaved", lambda found, clock, most: faster(name)(found))
        caplog.set_level(logging.INFO, "torch2ort")
        return caplog

    return choose


def tuned(model: nn.Module, **options) -> nn.Module:
    return torch2ort.ORTModule(copy.deepcopy(model), options=Options(autotune=True, **options))


LINEAR = Of(lambda m, x: m.a(x), a=nn.Linear(8, 6))
CONVOLUTION = Of(lambda m, x: m.a(x), a=nn.Conv2d(8, 6, 3, stride=2, padding=1, groups=2))
ROWS, IMAGES = torch.randn(4, 8), torch.randn(3, 8, 9, 7)
# Each operator of the table: a model with it, and the model's inputs.
MODELS = {
    aten.convolution.default: (CONVOLUTION, IMAGES),
    aten.convolution_backward.default: (CONVOLUTION, IMAGES),
    aten._native_batch_norm_legit_functional.default: (Of(lambda m, x: m.a(x), a=nn.BatchNorm2d(8)), IMAGES),
    aten._native_batch_norm_legit.no_stats: (
        Of(lambda m, x: m.a(x), a=nn.BatchNorm2d(8, track_running_stats=False)),
        IMAGES,
    ),
    aten._softmax.default: (Of(lambda m, x: x.softmax(-1)), ROWS),
    aten._softmax_backward_data.default: (Of(lambda m, x: x.softmax(0)), ROWS),
    aten._log_softmax.default: (Of(lambda m, x: x.log_softmax(-1)), ROWS),
    aten._log_softmax_backward_data.default: (Of(lambda m, x: x.log_softmax(0)), ROWS),
    aten.embedding.default: (
        Of(lambda m, x: m.a(torch.tensor([[1, 0], [3, 1]])) * x.sum(), a=nn.Embedding(4, 5, padding_idx=1)),
        ROWS,
    ),
    aten.gelu.default: (Of(lambda m, x: F.gelu(x)), ROWS),
    aten.sigmoid.default: (Of(lambda m, x: x.sigmoid()), ROWS),
    aten.sigmoid_backward.default: (Of(lambda m, x: x.sigmoid()), ROWS),
    aten.silu.default: (Of(lambda m, x: F.silu(x)), ROWS),
    aten.tanh.default: (Of(lambda m, x: x.tanh()), ROWS),
    aten.tanh_backward.default: (Of(lambda m, x: x.tanh()), ROWS),
    aten.mean.dim: (Of(lambda m, x: x.mean(0) * x), ROWS),
    aten.sum.dim_IntList: (Of(lambda m, x: x.sum([1], keepdim=True) * x), ROWS),
    aten.addmm.default: (LINEAR, ROWS),
    aten.bmm.default: (Of(lambda m, x: x[0].bmm(x[1].sin().mT)), IMAGES),
    aten.mm.default: (Of(lambda m, x: m.a(x).t() @ x, a=nn.Linear(8, 8, bias=False)), ROWS),
}
CASES = [(operator, a.name) for operator, alternatives in ALTERNATIVES.items() for a in alternatives]


@pytest.mark.parametrize(("operator", "name"), sample_cases(CASES, 5), ids=lambda value: str(value))
def test_every_alternative_gives_the_step_of_eager_pytorch(operator, name, fastest, monkeypatch):
    model, x = MODELS[operator]
    alternatives = tuple(a for a in ALTERNATIVES[operator] if a.name == name)
    monkeypatch.setattr(tuner, "ALTERNATIVES", {operator: alternatives})
    logged = fastest(name)
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))
    said = [line for line in logged.messages if f" of {operator} of " in line]
    # By the rule, derivatives of few numbers are decomposed, and ONNX Runtime computes what both support.
    by_rule = name == "parts" and operator in (aten.tanh_backward.default, aten.sigmoid_backward.default)
    by_rule |= name == "onnx" and operator in BETWEEN_LIBRARIES
    assert bool(said) is not by_rule
    assert all(alternatives[0].words in line for line in said)


@pytest.mark.parametrize("operator", BETWEEN_LIBRARIES, ids=str)
def test_onnx_runtime_does_what_a_rule_gives_to_kernels_where_that_is_faster(operator, fastest, monkeypatch):
    every = frozenset().union(*KINDS.values())
    monkeypatch.setattr(calibration, "faster_in_kernels", lambda: every)
    monkeypatch.setattr(step_target, "LARGE", 0)
    monkeypatch.setattr(step_target, "_WIDE", 0)
    # On channels-last images PyTorch's kernels compute all convolutions.
    monkeypatch.setattr(plan_builder, "CONVOLUTIONS", frozenset({"nothing"}))
    logged = fastest("onnx")
    model, x = MODELS[operator]
    if operator is aten.convolution.default:
        model = Of(lambda m, x: m.a(x), a=nn.Conv2d(8, 6, 3, stride=2, padding=1))
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))
    said = [line for line in logged.messages if f" of {operator} of " in line]
    assert said
    assert all("in ONNX Runtime's operator" in line for line in said)


def test_a_large_derivative_is_taken_apart_where_that_is_faster(fastest):
    logged = fastest("parts")
    model, x = MODELS[aten.tanh_backward.default][0], torch.randn(160, 128)
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))
    assert [line for line in logged.messages if "of aten.tanh_backward.default" in line] == [
        "autotune: 1 of aten.tanh_backward.default of [160, 128], [160, 128]: in parts in ONNX Runtime, "
        "in 0.50 of the time by the rule (1000000 microseconds)."
    ]


def test_a_product_with_factors_is_not_turned(fastest):
    fastest("turned")
    model = Of(lambda m, x: torch.addmm(m.a.bias, x, m.a.weight.t(), beta=0.5, alpha=2.0), a=nn.Linear(8, 6))
    torch.testing.assert_close(step(tuned(model), ROWS), step(copy.deepcopy(model), ROWS))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_gradient_is_a_transposed_convolution_in_each_rank(rank, fastest):
    logged = fastest("transposed")
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[rank]
    model = Of(lambda m, x: m.a(x), a=kind(2, 3, 2, stride=3, dilation=2, padding=1))
    x = torch.randn(2, 2, *range(7, 7 + rank))
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))
    assert "ConvTranspose" in logged.text


@pytest.mark.parametrize("operator", [torch.sigmoid, F.silu, F.gelu, torch.tanh], ids=lambda o: o.__name__)
def test_numbers_far_from_zero_are_exact_whoever_does_it(operator, monkeypatch):
    def other(found, clock, most):
        return {name: 1.0 if name in (RULE, AGAIN) else 0.5 for name in found}

    monkeypatch.setattr(microbenchmark, "interleaved", other)
    x = torch.tensor([-200.0, -95.0, -88.0, -50.0, -20.0, -10.0, 0.0, 10.0, 100.0, torch.inf, torch.nan])
    found = tuned(Of(lambda m, x: operator(x)))(x.requires_grad_())
    torch.testing.assert_close(found, operator(x), rtol=1e-5, atol=0.0, equal_nan=True)


class Images(nn.Module):
    """Convolutions, with operators between, beside and behind them."""

    def __init__(self) -> None:
        super().__init__()
        # The gradient of a bias in front of a normalisation is nothing but rounding errors.
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up, self.norm = nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(8)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        z = y + self.second(y).tanh()
        return self.up(F.max_pool2d(z, 2)), z.flatten(1).softmax(1), y


# Sums are added up in the order of eager PyTorch in this layout.
PICTURES, LAST = torch.randn(2, 3, 6, 8), torch.channels_last


def test_images_run_channels_last_where_that_is_faster(fastest, tmp_path):
    logged = fastest(microbenchmark.LAID)
    model = Images()
    tensors = step(tuned(model, save_onnx_dir=tmp_path), PICTURES)
    torch.testing.assert_close(tensors, step(model.to(memory_format=LAST), PICTURES.to(memory_format=LAST)))
    assert (
        "autotune: 20 operators of images run channels-last, in 0.50 of the time by the rule "
        "(1000000 microseconds)."
    ) in logged.messages
    # The picture and three results are converted into and out of the layout; nothing in between is.
    (file,) = tmp_path.glob("*_forward_optimized.onnx")
    assert sum(node.op_type == "Transpose" for node in onnx.load(file).graph.node) <= 4


def test_a_model_in_channels_last_is_computed_so(fastest):
    fastest(RULE)
    model, x = Images().to(memory_format=LAST), PICTURES.to(memory_format=LAST)
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))


def test_what_fused_regions_leave_is_decided(fastest, monkeypatch):
    regions, logged = interpret(monkeypatch), fastest("kernel")
    model = Images()
    torch.testing.assert_close(step(tuned(model, fuse=True), PICTURES), step(copy.deepcopy(model), PICTURES))
    assert regions
    assert [line for line in logged.messages if "of aten.convolution.default of [2, 3, 6, 8]" in line]


def test_a_layout_holds_for_a_backward_of_another_process(fastest, tmp_path):
    fastest(microbenchmark.LAID)
    model = Images()

    def gradients(module: nn.Module, pictures: torch.Tensor, result: int) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module.zero_grad()
        module(pictures)[result].square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    for result in range(3):
        found = gradients(tuned(model, cache_dir=tmp_path), PICTURES, result)
        other = copy.deepcopy(model).to(memory_format=LAST)
        torch.testing.assert_close(found, gradients(other, PICTURES.to(memory_format=LAST), result))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({RULE: 1.0, AGAIN: 1.0}, RULE),
        ({RULE: 1.0, AGAIN: 1.0, "kernel": 0.9}, "kernel"),
        ({RULE: 1.0, AGAIN: 1.0, "kernel": 0.9, "turned": 0.8}, "turned"),
        ({RULE: 1.0, AGAIN: 1.0, "kernel": 0.96}, RULE),
        ({RULE: 1.0, AGAIN: 0.9, "kernel": 0.88}, RULE),
        ({RULE: 1.0, AGAIN: 0.8, "kernel": 0.7}, RULE),
    ],
    ids=["alone", "faster", "the fastest", "hardly faster", "no faster than the better", "within the noise"],
)
def test_another_way_than_the_rules_has_to_win_clearly(seconds, chosen):
    assert winner(seconds) == chosen


def graph_of(operator=aten.tanh.default, size=4) -> torch.fx.Graph:
    """A half of one operator over a vector."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = FakeTensorMode().from_tensor(torch.ones(size))
    made = graph.call_function(operator, (given,))
    made.meta["val"] = operator(given.meta["val"])
    graph.output((made,))
    return graph


def tune(store: Store | None, time_of, options: Options | None = None, **arguments) -> torch.fx.Graph:
    """Tune such a half in a process without earlier measurements, and return it."""
    tuner._KNOWN.seconds.clear()
    options = options or Options()
    graph = graph_of()
    target = target_of(options)
    rewriting = Rewriting(graph)
    Tuner(target, options, store, time_of=time_of, **arguments).tune(rewriting)
    graph.owning = rewriting  # keeps the calls alive
    return graph


def is_kernel(graph: torch.fx.Graph) -> bool:
    return any(node.target is torch.ops.torch2ort.python_op.default for node in graph.nodes)


@pytest.mark.parametrize(("name", "kernel"), [("kernel", True), (RULE, False)])
def test_a_decision_is_kept_for_other_processes(name, kernel, tmp_path):
    store = Store(tmp_path)
    assert is_kernel(tune(store, faster(name))) is kernel
    assert is_kernel(tune(store, never)) is kernel


def test_a_decision_holds_in_its_process_without_a_cache():
    assert is_kernel(tune(None, faster("kernel")))
    graph = graph_of()
    options = Options()
    rewriting = Rewriting(graph)
    Tuner(target_of(options), options, None, time_of=never).tune(rewriting)
    assert is_kernel(graph)
    assert rewriting.sites


@pytest.mark.parametrize("other", ["processor", "threads"])
def test_another_machine_measures_for_itself(other, tmp_path, monkeypatch):
    store = Store(tmp_path)
    tune(store, faster("kernel"))
    if other == "processor":
        monkeypatch.setattr(machines, "processor_name", lambda: "another one")
    options = Options(intra_op_threads=7 if other == "threads" else None)
    assert not is_kernel(tune(store, faster(RULE), options))


def test_a_damaged_file_is_measured_again(tmp_path):
    store = Store(tmp_path)
    tune(store, faster(RULE))
    (file,) = tmp_path.rglob("manifest.json")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
        assert is_kernel(tune(store, faster("kernel")))


def test_without_time_the_rule_holds_and_nothing_is_kept(tmp_path):
    store = Store(tmp_path)
    assert not is_kernel(tune(store, never, budget=lambda: 0.0))
    assert is_kernel(tune(store, faster("kernel")))


def test_a_way_with_other_results_is_not_among_those_that_are_timed():
    def first_alone(rewriting, node):
        node.replace_all_uses_with(node.args[0])

    table = {aten.tanh.default: (Alternative("identity", "wrongly", first_alone), KERNEL)}
    seen = []
    tune(None, lambda found: seen.append(set(found)) or faster(RULE)(found), table=table)
    assert seen == [{RULE, AGAIN, "kernel"}]


def saved(model: nn.Module, x: torch.Tensor, folder: Path, **options) -> dict[str, str]:
    """The saved graphs of a step, by kind; the names of calls differ from build to build."""
    step(torch2ort.ORTModule(copy.deepcopy(model), options=Options(save_onnx_dir=folder, **options)), x)
    found = {}
    for file in sorted(folder.glob("*.onnx")):
        text = str(onnx.load(file).graph)
        found[re.sub(r"^\W*\d+", "", file.name)] = re.sub(r"[0-9a-f]{16,}|@\d+", "", text)
    return found


def test_where_the_rule_wins_the_graphs_are_those_without_the_option(tmp_path, fastest):
    fastest(RULE)
    model, x = MODELS[aten.convolution.default]
    without = saved(model, x, tmp_path / "off")
    assert len(without) >= 2
    assert saved(model, x, tmp_path / "on", autotune=True) == without


def test_without_the_option_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(microbenchmark, "interleaved", never)
    model, x = MODELS[aten.convolution.default]
    step(torch2ort.ORTModule(copy.deepcopy(model)), x)


def test_a_warm_start_measures_nothing(tmp_path, fastest, monkeypatch):
    fastest("kernel")
    model, x = MODELS[aten.convolution.default]
    expected = step(tuned(model, cache_dir=tmp_path), x)
    tuner._KNOWN.seconds.clear()
    monkeypatch.setattr(microbenchmark, "interleaved", never)
    torch.testing.assert_close(step(tuned(model, cache_dir=tmp_path), x), expected, rtol=0, atol=0)


def test_graphs_of_the_option_are_not_those_without_it(tmp_path, fastest, monkeypatch):
    fastest("kernel")
    model, x = MODELS[aten.tanh.default]
    step(tuned(model, cache_dir=tmp_path / "cache"), x)
    monkeypatch.setattr(microbenchmark, "interleaved", never)
    folder = tmp_path / "saved"
    kept = saved(model, x, folder, cache_dir=tmp_path / "cache")
    assert any("Tanh" in graph for name, graph in kept.items() if "forward" in name)


def test_operators_over_sizes_that_vary_stay_with_the_rule(fastest):
    logged = fastest("kernel")
    module = tuned(Of(lambda m, x: m.a(x).tanh(), a=nn.Linear(4, 4)))
    for size in (3, 5, 7):
        x = torch.randn(size, 4)
        torch.testing.assert_close(step(module, x), step(copy.deepcopy(module.module), x))
    assert "autotune: of 0 operators, none." in logged.messages


def test_half_precision_stays_with_the_rule(fastest):
    logged = fastest("onnx")
    model = Of(lambda m, x: F.silu(m.a(x)), a=nn.Linear(8, 8)).bfloat16()
    x = ROWS.bfloat16()
    torch.testing.assert_close(step(tuned(model), x), step(copy.deepcopy(model), x))
    assert "autotune: of 0 operators, none." in logged.messages
