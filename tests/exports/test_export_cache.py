"""A hit gives a fresh export's results without exporting; a doubtful case is a miss or a bypass."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import types
from pathlib import Path

import onnxruntime
import pytest
import torch

import torch2ort
from tests.cache.model_source import SOURCE, changed, imported
from tests.models.test_autograd_functions import Around, Mlp
from tests.models.test_convolutional import ConvNet
from tests.support.comparison import assert_trains_like_eager
from tests.support.functions import Affine, Constants, Numpy, Square, TwoOutputs, scaled
from torch2ort.cache.key import key
from torch2ort.cache.store.store import Store
from torch2ort.errors import ExportError, Torch2OrtWarning
from torch2ort.runtime import optimized_model
from torch2ort.symbolics.backward_decompositions import LARGE
from torch2ort.training import plan_builder

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def transformers_models() -> types.ModuleType:
    """The models of transformers, where that is installed."""
    pytest.importorskip("transformers")
    return importlib.import_module("tests.models.test_transformers")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that every export uses."""
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> dict[str, Path]:
    """Folder of each entry by its kind."""
    return {e.manifest.kind: cache / "v1" / e.manifest.digest for e in Store(cache).list_entries()}


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch):
    """Return a function after whose call every export and every differentiation is an error."""

    def forbid() -> None:
        def fail(*args, **kwargs):
            raise AssertionError("something was built that should have come out of the cache")

        monkeypatch.setattr(torch.export, "export", fail)
        monkeypatch.setattr(plan_builder, "trace_joint", fail)
        monkeypatch.setattr(plan_builder, "lower_half", fail)

    return forbid


def test_a_second_export_is_a_hit(cache, nothing_is_built):
    model = Mlp()
    first = torch2ort.export(model, torch.randn(5, 6))
    nothing_is_built()
    x = torch.randn(5, 6)
    second = torch2ort.export(copy.deepcopy(model), x)
    assert (first.cache.hit, second.cache.hit) == (False, True)
    assert (first.cache.bypass_reason, second.cache.bypass_reason) == (None, None)
    assert first.cache.key == second.cache.key
    torch.testing.assert_close(second(x), model(x))
    assert second.proto == first.proto
    assert [site.function for site in second.python_ops] == [Affine, Constants, TwoOutputs]


def test_a_cache_that_is_switched_off_keeps_nothing():
    report = torch2ort.export(torch.nn.Linear(4, 2), X, cache_dir=False).cache
    assert (report.hit, report.key, report.bypass_reason) == (False, None, None)


def test_the_folder_may_be_an_argument_or_an_option(tmp_path):
    torch2ort.export(torch.nn.Linear(4, 2), X, cache_dir=tmp_path / "cache")
    options = torch2ort.Options(cache_dir=tmp_path / "cache")
    assert torch2ort.export(torch.nn.Linear(4, 2), X, options=options).cache.hit


def test_what_was_not_used_for_longest_makes_room(cache):
    """The limit leaves room for exactly one of these graphs."""
    sizes = (4, 5)
    torch2ort.export(torch.nn.Linear(4, 2), torch.zeros(sizes[0], 4))
    (entry,) = Store(cache).list_entries()
    options = torch2ort.Options(cache_limit=entry.size * 3 // 2)
    hits = [
        torch2ort.export(torch.nn.Linear(4, 2), torch.zeros(size, 4), options=options).cache.hit
        for size in (*sizes, sizes[1], sizes[0])
    ]
    assert hits == [True, False, True, False]


def test_other_values_of_parameters_are_a_hit_with_the_new_values(cache, nothing_is_built):
    torch2ort.export(ConvNet().eval(), torch.randn(2, 3, 12, 12))
    nothing_is_built()
    torch.manual_seed(5)
    model, x = ConvNet().eval(), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        model.norm.running_mean.add_(0.5)
    exported = torch2ort.export(model, x)
    assert exported.cache.hit
    torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)


def twice_thrice(h):
    return THRICE.apply(torch.tanh(TWICE.apply(h)))


TWICE, THRICE = scaled(2.0), scaled(3.0)


class OnColumns(torch.nn.Module):
    """Scales by a parameter, for any number of columns, and calls a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale)


def large_activation(h):
    """Apply an activation so large that PyTorch's kernels compute it and its derivative."""
    return torch.nn.functional.gelu(h.repeat(1, LARGE // 4)).mean(-1, keepdim=True) * h


TRAINED = pytest.mark.parametrize(
    ("make", "batch"),
    [
        pytest.param(Mlp, lambda: (torch.randn(5, 6, requires_grad=True),), id="three Functions"),
        pytest.param(lambda: Around(Numpy.apply), lambda: (torch.randn(5, 4),), id="numpy body"),
        pytest.param(lambda: Around(twice_thrice), lambda: (torch.randn(5, 4),), id="two of one name"),
        pytest.param(lambda: Around(large_activation), lambda: (torch.randn(5, 4),), id="large activation"),
        pytest.param(ConvNet, lambda: (torch.randn(4, 3, 12, 12),), id="running statistics"),
        pytest.param(lambda: ConvNet().eval(), lambda: (torch.randn(4, 3, 12, 12),), id="eval mode"),
        pytest.param(
            lambda: transformers_models().bert().train(),
            lambda: transformers_models().bert_batch(4, 8),
            id="transformer with dropout",
        ),
    ],
)


@TRAINED
def test_a_module_out_of_the_cache_trains_like_eager(cache, nothing_is_built, make, batch):
    assert_trains_like_eager(make(), [batch()], lr=0.01, steps=1)
    nothing_is_built()
    torch.manual_seed(7)
    module = assert_trains_like_eager(make(), [batch()], torch.optim.AdamW, lr=0.01, steps=5)
    assert module.exported.cache.hit


@pytest.mark.parametrize("hit", [False, True])
def test_modules_whose_graphs_name_their_nodes_alike_call_their_own_functions(cache, nothing_is_built, hit):
    if hit:
        for function in (TWICE, THRICE):
            torch2ort.ORTModule(Around(function.apply))(torch.randn(5, 4)).sum().backward()
        nothing_is_built()
    models = [Around(function.apply) for function in (TWICE, THRICE, TWICE)]
    modules = [torch2ort.ORTModule(copy.deepcopy(model)) for model in models]
    x = torch.randn(5, 4)
    outputs = [module(x) for module in modules]
    for output, module, model in zip(outputs, modules, models, strict=True):
        output.sum().backward()
        expected = model(x)
        expected.sum().backward()
        assert module.exported.cache.hit == (hit or module is modules[2])
        torch.testing.assert_close(output, expected)
        for own, eager in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, eager.grad)


@pytest.mark.parametrize("call", [Square.apply, Numpy.apply, torch.relu])
def test_a_module_out_of_the_cache_infers_like_eager(cache, nothing_is_built, monkeypatch, call):
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch2ort.ORTModule(Around(call))(x)
        nothing_is_built()
        monkeypatch.setattr(optimized_model, "_optimized", None)
        model = Around(call)
        module = torch2ort.ORTModule(copy.deepcopy(model))
        for _ in range(3):
            torch.testing.assert_close(module(x), model(x))
        assert module.exported.cache.hit


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(onnxruntime, "__version__", "99.1", id="version of the engine"),
        pytest.param(optimized_model, "processor_features", lambda: "another processor", id="machine"),
    ],
)
def test_what_another_engine_optimised_is_a_miss(cache, nothing_is_built, monkeypatch, owner, name, value):
    torch2ort.ORTModule(Around(Square.apply))(X)
    nothing_is_built()
    torch2ort.ORTModule(Around(Square.apply))(X)
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(AssertionError, match="something was built"):
        torch2ort.ORTModule(Around(Square.apply))(X)


def test_a_start_out_of_the_cache_walks_over_the_model_once(cache, monkeypatch):
    torch2ort.ORTModule(Around(Square.apply))(X).sum().backward()
    walks = []
    walk = key.Walk.run

    def counted(self: key.Walk) -> None:
        walks.append(self)
        walk(self)

    monkeypatch.setattr(key.Walk, "run", counted)
    torch2ort.ORTModule(Around(Square.apply))(X).sum().backward()
    assert len(set(map(id, walks))) == 1


def test_sizes_that_vary_are_a_hit_in_another_order(cache, nothing_is_built):
    def batches(*sizes: int) -> list[tuple[torch.Tensor]]:
        return [(torch.randn(n, 4, requires_grad=True),) for n in sizes]

    assert_trains_like_eager(Around(Square.apply), batches(3, 5, 7), lr=0.01, steps=3)
    nothing_is_built()
    assert_trains_like_eager(Around(Square.apply), batches(3, 9, 4, 3), lr=0.01, steps=4)


def test_a_size_that_no_process_has_seen_is_a_hit_once_it_is_known_to_vary(cache, nothing_is_built):
    batches = [(torch.randn(n, 4, requires_grad=True),) for n in (3, 5, 7)]
    assert_trains_like_eager(Around(Square.apply), batches, lr=0.01, steps=3)
    nothing_is_built()
    x = torch.randn(11, 4, requires_grad=True)
    module = assert_trains_like_eager(Around(Square.apply), [(x,)], lr=0.01, steps=2)
    assert module.exported.cache.hit


def unpooled(h):
    """Unpool; the indices are compared with a size that no tensor has, which must not vary."""
    places = h.detach().argsort(1) * 2
    return torch.nn.functional.max_unpool1d(h, places, 2)


def test_that_an_export_for_varying_sizes_fails_is_known_to_the_next_process(cache, nothing_is_built):
    batches = [(torch.randn(4, n),) for n in (4, 6)]
    assert_trains_like_eager(OnColumns(unpooled), batches, lr=0.01, steps=2)
    assert {e.manifest.kind for e in Store(cache).list_entries()} >= {"graph", "joint forward"}
    nothing_is_built()
    assert_trains_like_eager(OnColumns(unpooled), batches, lr=0.01, steps=2)


def test_who_asks_for_varying_sizes_is_told_the_present_error(cache, nothing_is_built):
    """The error is that of the present call, not one from the cache."""
    assert_trains_like_eager(OnColumns(unpooled), [(torch.randn(4, n),) for n in (4, 6)], steps=2)
    shapes = {"x": {1: torch.export.Dim.AUTO}}
    for _ in range(2):
        with pytest.raises(ExportError, match="gets indices that must be below a size that varies"):
            torch2ort.export(OnColumns(unpooled), torch.randn(4, 6), dynamic_shapes=shapes)
    nothing_is_built()
    with pytest.raises(AssertionError, match="something was built"):
        torch2ort.export(OnColumns(unpooled), torch.randn(4, 6), dynamic_shapes=shapes)


def test_an_export_for_fixed_sizes_takes_no_graph_whose_sizes_vary(cache):
    shapes = {"input": {0: torch.export.Dim("batch", min=2)}}
    torch2ort.export(torch.nn.Linear(4, 2), X, dynamic_shapes=shapes)
    exported = torch2ort.export(torch.nn.Linear(4, 2), X)
    assert not exported.cache.hit
    assert [d.dim_value for d in exported.proto.graph.input[0].type.tensor_type.shape.dim] == [3, 4]


def test_dynamic_shapes_are_a_hit_for_another_sample(cache, nothing_is_built):
    shapes = {"input": {0: torch.export.Dim("batch", min=2)}}
    torch2ort.export(torch.nn.Linear(4, 2), X, dynamic_shapes=shapes)
    nothing_is_built()
    model = torch.nn.Linear(4, 2)
    exported = torch2ort.export(model, torch.zeros(7, 4), dynamic_shapes=shapes)
    assert exported.cache.hit
    torch.testing.assert_close(exported(X), model(X))


def test_an_output_that_is_a_class_comes_back_as_that_class(cache):
    models = transformers_models()
    batch = models.bert_batch(2, 8)
    for hit in (False, True):
        model = models.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).eval()
        exported = torch2ort.export(model, batch)
        assert exported.cache.hit == hit
        given, expected = exported(**batch), model(**batch)
        assert type(given) is type(expected)
        torch.testing.assert_close(given.logits, expected.logits, rtol=1e-4, atol=1e-5)


# --- wrong hits


def exported_from(source: str, **settings) -> tuple[torch2ort.ExportedModel, torch.nn.Module, torch.Tensor]:
    """An export of the model that ``source`` makes, the model, and its result for X."""
    with imported(source) as module:
        model = module.make()
        exported = torch2ort.export(model, X, **settings)
        with torch.no_grad():
            return exported, model, model(X)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("h = helper(self.first(x))", "h = 2 * helper(self.first(x))", id="forward, same repr"),
        pytest.param("self.gain = 0.75", "self.gain = 0.5", id="attribute that repr does not show"),
        pytest.param("return x * x * bias()", "return x * x * 3.0 * bias()", id="Function"),
        pytest.param("return x + 1.5", "return x + 1.25", id="helper of a helper"),
        pytest.param("SCALE = 2.0", "SCALE = 2.5", id="global"),
        pytest.param("made(0.25)", "made(0.5)", id="closure"),
    ],
)
def test_a_changed_source_is_a_miss_with_the_new_result(cache, before, after):
    first, _, before_result = exported_from(SOURCE)
    again, _, _ = exported_from(SOURCE)
    other, _, expected = exported_from(changed(before, after))
    assert [e.cache.hit for e in (first, again, other)] == [False, True, False]
    torch.testing.assert_close(again(X), before_result)
    torch.testing.assert_close(other(X), expected)


def test_a_function_changed_behind_its_site_is_the_new_one(cache):
    """The graph only names the Function, so a changed constant in it does not change the graph."""
    first, _, _ = exported_from(SOURCE)
    other, _, expected = exported_from(changed("return 1.0\n", "return 1.5\n"))
    assert not other.cache.hit
    assert first.proto.graph.node[0].op_type == other.proto.graph.node[0].op_type
    torch.testing.assert_close(other(X), expected)


def cube(g, x):
    return g.op("Mul", g.op("Mul", x, x), x)


def test_a_registration_is_a_miss(cache):
    model = Around(Square.apply)
    assert not torch2ort.export(model, X).cache.hit
    torch2ort.register_exporter(Square, cube)
    try:
        exported = torch2ort.export(model, X)
    finally:
        torch2ort.unregister(Square)
    assert not exported.cache.hit
    assert exported.python_ops == ()
    assert torch2ort.export(model, X).cache.hit


@pytest.mark.parametrize(
    ("model", "x", "settings"),
    [
        pytest.param(lambda m: m, X, {"training": False}, id="mode"),
        pytest.param(lambda m: m.double(), X.double(), {}, id="dtype"),
        pytest.param(lambda m: m, X.clone().requires_grad_(), {}, id="requires_grad of an input"),
        pytest.param(lambda m: m.requires_grad_(False), X, {}, id="requires_grad of the parameters"),
        pytest.param(lambda m: m, X, {"opset": 20}, id="opset"),
        pytest.param(lambda m: m, X[:2], {}, id="size"),
        pytest.param(lambda m: m, {"input": X}, {}, id="structure, the same bound"),
    ],
)
def test_another_setting_is_a_miss(cache, model, x, settings, request):
    torch2ort.export(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), X)
    other = model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    exported = torch2ort.export(other, x, **settings)
    assert exported.cache.hit == ("same bound" in request.node.name)


# --- bypasses


class TakesAnything(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, thing):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Thing:
    pass


class WithObject(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thing = Thing()

    def forward(self, x):
        return TakesAnything.apply(x, self.thing)


class MadeInside(torch.nn.Module):
    def forward(self, x):
        return scaled(3.0).apply(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            WithObject,
            "tests.exports.test_export_cache.TakesAnything: argument 1 is <an object of type Thing, not "
            "stored in the file>, and exists only in this process.",
            id="object argument",
        ),
        pytest.param(
            MadeInside,
            "tests.support.functions.scaled.<locals>.Scaled is called, but it is not found from the model's "
            "code and attributes; define it at the top of a module, or make it an attribute of the model.",
            id="Function made inside forward",
        ),
    ],
)
def test_what_cannot_be_stored_is_exported_each_time(cache, model, reason):
    for _ in range(2):
        exported = torch2ort.export(model(), X)
        assert (exported.cache.hit, exported.cache.key) == (False, None)
        assert exported.cache.bypass_reason == reason
        torch.testing.assert_close(exported(X), model()(X))
    assert entries(cache) == {}


def test_what_cannot_be_keyed_is_exported_each_time(cache):
    source = changed("return 1.0\n", "import os\n    return float(os.getpid() > 0)\n")
    for _ in range(2):
        exported, _, expected = exported_from(source)
        assert not exported.cache.hit
        assert exported.cache.bypass_reason == (
            "code net.bias: functions of the module os may give other results in each process."
        )
        torch.testing.assert_close(exported(X), expected)


def test_graphs_of_every_stage_are_made_when_asked_for(cache, tmp_path):
    for _ in range(2):
        options = torch2ort.Options(save_onnx_dir=tmp_path / "stages")
        exported = torch2ort.export(torch.nn.Linear(4, 2), X, options=options)
        assert exported.cache.bypass_reason == (
            "save_onnx_dir requests the graph of every stage, which only an export makes."
        )


# --- damage, and folders that do not serve


@pytest.mark.parametrize("kind", ["graph", "joint forward", "joint backward"])
def test_a_damaged_entry_is_a_warning_and_made_again(cache, kind):
    batches = [(torch.randn(5, 4),)]
    assert_trains_like_eager(Around(Square.apply), batches, steps=1)
    for file in list(entries(cache)[kind].iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
            assert_trains_like_eager(Around(Square.apply), batches, steps=2)
    module = assert_trains_like_eager(Around(Square.apply), batches, steps=2)
    assert module.exported.cache.hit


def test_a_folder_that_others_can_write_to_keeps_nothing(cache, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    with caplog.at_level("INFO", "torch2ort"):
        exported = torch2ort.export(torch.nn.Linear(4, 2), X)
    assert exported.cache.bypass_reason == (
        f"the export cache is not used, because the directory {cache} can be written to by others (mode "
        f"0777), expected 0700; run `chmod go-w` on it."
    )
    said = [record.message for record in caplog.records if "export cache" in record.message]
    assert said == [f"the export is not cached: {exported.cache.bypass_reason}"]
    assert list(cache.iterdir()) == []


def test_a_full_disk_keeps_nothing(cache, monkeypatch, caplog):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    model = Around(Square.apply)
    with caplog.at_level("INFO", "torch2ort"):
        module = assert_trains_like_eager(model, [(torch.randn(5, 4),)], steps=2)
    assert module.exported.cache.bypass_reason == (
        "the export cache could not be written, so the next start will export again: [Errno 28] No space "
        "left on device."
    )
    assert caplog.text.count("is not cached: the export cache could not be written") == 1
    assert entries(cache) == {}


def test_an_error_of_the_model_is_not_cached(cache):
    class Raises(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    for _ in range(2):
        with pytest.raises(ValueError, match="not today"):
            torch2ort.export(Raises(), X)
    assert entries(cache) == {}
