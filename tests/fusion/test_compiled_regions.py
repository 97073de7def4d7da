"""A region is compiled once per machine, and compared with PyTorch's kernels before it is used."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import sympy
import torch

import torch2ort
from torch2ort._torch import inductor
from torch2ort.cache.store.store import Store
from torch2ort.errors import EngineError
from torch2ort.fusion import compile, compiled_regions
from torch2ort.fusion.accuracy_check import difference
from torch2ort.fusion.library_loader import NativeRegion
from torch2ort.fusion.region import decode_region, encode_region, in_float32
from torch2ort.kernels.functions import encode_call
from torch2ort.sizes.expressions import parse

pytestmark = [
    # A compiler on a busy machine may need minutes.
    pytest.mark.timeout(600),
]
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++")

X = torch.tensor([[0.5, -2.0, float("nan"), -0.0], [1e30, 3.0, -1e-30, 7.0]])
TANH = encode_call(torch.ops.aten.tanh.default, [{"tensor": 0}], {}, random=False)
SHAPES = [(torch.float32, (2, 4))]
TEXT = encode_region(SHAPES, [(TANH, [0], ()), (TANH, [1], ())], [2])
ABS = encode_call(torch.ops.aten.abs.default, [{"tensor": 0}], {}, random=False)
OTHER = encode_region(SHAPES, [(ABS, [0], ()), (TANH, [1], ())], [2])


@pytest.fixture
def libraries(monkeypatch):
    """The libraries of a process that has none yet."""
    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


class Model(torch.nn.Module):
    """One region forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x) * 2).sum(-1)


def gradients(module, x):
    module.zero_grad()
    module(x).pow(2).sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def fused(model, folder):
    return torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(fuse=True, cache_dir=folder))


def fails(*args, **kwargs):
    raise RuntimeError("no g++\nand more")


def forget_the_compiler(monkeypatch):
    monkeypatch.setattr(inductor, "compile_library", fails)
    monkeypatch.setattr(inductor, "compile_package", fails)


@compiles
def test_they_compute_what_pytorchs_kernels_do_by_one_run_of_the_compiler(libraries, folder, monkeypatch):
    runs = []
    compile_library = inductor.compile_library
    monkeypatch.setattr(
        inductor, "compile_library", lambda *a, **k: runs.append(a) or compile_library(*a, **k)
    )
    texts = [TEXT, OTHER]
    assert compiled_regions.compile_or_load([*texts, TEXT], Store(folder)) == set(texts)
    assert len(runs) == 1
    for text in texts:
        assert compiled_regions.native_of(text)
        found = compiled_regions.runner_of(text)([X])
        torch.testing.assert_close(tuple(found), decode_region(text).run([X]), equal_nan=True)


def test_what_another_thread_compiles_meanwhile_is_compiled(monkeypatch):
    from torch._inductor.graph import GraphLowering

    theirs = types.SimpleNamespace(_compile_to_module=lambda: "their module")
    ours = types.SimpleNamespace(codegen=lambda: (types.SimpleNamespace(value="our code"), None))
    found = []

    def compile_both(*args, **kwargs):
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(GraphLowering.compile_to_module, theirs).result())
        GraphLowering.compile_to_module(ours)

    monkeypatch.setattr("torch._inductor.compile", compile_both)
    assert inductor.wrapper_of(decode_region(TEXT).run, (X,), threads=1) == "our code"
    assert found == ["their module"]


@compiles
@pytest.mark.parametrize("text", [TEXT, OTHER])
def test_another_process_finds_each_of_them(text, libraries, folder, monkeypatch):
    forget_the_compiler(monkeypatch)
    assert compiled_regions.compile_or_load([text], Store(folder)) == {text}
    assert compiled_regions.native_of(text)
    found = compiled_regions.runner_of(text)([X])
    torch.testing.assert_close(tuple(found), decode_region(text).run([X]), equal_nan=True)


N = parse("n0")
NORM = encode_call(
    torch.ops.aten.native_layer_norm.default, [{"tensor": 0}, [4], None, None, 1e-5], {}, random=False
)
VIEW = encode_call(torch.ops.aten.reshape.default, [{"tensor": 0}, [{"size": 0}]], {}, random=False)
SUM = encode_call(torch.ops.aten.sum.dim_IntList, [{"tensor": 0}, [0, 1]], {}, random=False)
# Normalised rows, all in one dimension, and a sum over a dimension that varies.
VARYING = encode_region(
    [(torch.float32, (N, 3, 4))],
    [(TANH, [0], ()), (NORM, [1], ()), (VIEW, [2], (12 * N,)), (SUM, [1], ())],
    [5, 6, 3],
)


# A batch's statistics, divided by one less than the number of elements.
STATISTICS = encode_call(
    torch.ops.aten._native_batch_norm_legit_functional.default,
    [*({"tensor": i} for i in (0, 1, 1)), {"tensor": 2}, {"tensor": 2}, True, 0.1, 1e-5],
    {},
    random=False,
)
BATCH = encode_region(
    [(torch.float32, (N, 3, 4)), *[(torch.float32, (3,))] * 2],
    [(TANH, [0], ()), (STATISTICS, [3, 1, 2], ())],
    [4, 7, 8],
)


@compiles
def test_one_library_is_for_all_sizes_and_for_the_next_process(libraries, tmp_path, monkeypatch):
    texts = {VARYING, BATCH}
    for _ in range(2):
        assert compiled_regions.compile_or_load(texts, Store(tmp_path)) == texts
        for text in texts:
            assert compiled_regions.native_of(text)
            for count in (2, 3, 7, 5000):
                tensors = [torch.randn(count, 3, 4), torch.ones(3), torch.rand(3)][
                    : 1 if text == VARYING else 3
                ]
                found, expected = compiled_regions.runner_of(text)(tensors), decode_region(text).run(tensors)
                torch.testing.assert_close(tuple(found), expected, rtol=1e-4, atol=1e-4)
        # Once more as another process.
        monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())
        forget_the_compiler(monkeypatch)


@compiles
def test_code_that_is_for_some_sizes_alone_is_not_used(libraries, monkeypatch):
    conditions = [[parse("n0") - 5 > 0], [sympy.Eq(parse("n0"), 4099)]]
    monkeypatch.setattr(inductor.InductorTrace, "conditions", lambda self: conditions.pop(0))
    assert isinstance(compile.compile_regions([VARYING])[VARYING], compile.CompiledRegion)
    unmade = compile.compile_regions([VARYING])[VARYING]
    assert unmade == compile.CompileFailure("UnknownCodeError: its code is for sizes where Eq(n0, 4099)")


@pytest.mark.parametrize(("wrong", "where"), [(2, "{'n0': 2}"), (17, "{'n0': 17}"), (5003, "{'n0': 5003}")])
def test_a_library_for_all_sizes_is_compared_for_several(wrong, where):
    def run(tensors):
        found = decode_region(VARYING).run(tensors)
        return [found[0] + (len(tensors[0]) == wrong), *found[1:]]

    assert difference(VARYING, run) == f"output 0 differs from that of PyTorch's kernels where {where}"


@compiles
def test_a_library_in_the_cache_that_does_not_load_is_made_again(libraries, tmp_path, monkeypatch):
    made = compile.compile_regions([TEXT])[TEXT]
    damaged = compile.CompiledRegion(
        made.run, compile.EntryContent(made.kept.data, {"regions.so": b"another machine's"})
    )
    with monkeypatch.context() as patched:
        patched.setattr(compiled_regions, "compile_regions", lambda texts: {text: damaged for text in texts})
        compiled_regions.compile_or_load([TEXT], Store(tmp_path))
    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())
    assert compiled_regions.compile_or_load([TEXT], Store(tmp_path)) == {TEXT}
    assert isinstance(compiled_regions.runner_of(TEXT), NativeRegion)


@compiles
@pytest.mark.long
def test_what_inductor_writes_in_another_form_is_a_package(libraries, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            inductor, "wrapper_of", lambda *a, **k: "def call(args):\n    return unheard_of(args)"
        )
        assert compiled_regions.compile_or_load([TEXT], Store(tmp_path)) == {TEXT}
    for _ in range(2):
        assert compiled_regions.native_of(TEXT) is None
        torch.testing.assert_close(compiled_regions.runner_of(TEXT)([X])[0], X.tanh().tanh(), equal_nan=True)
        # Once more as another process.
        monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())
        forget_the_compiler(monkeypatch)
        assert compiled_regions.compile_or_load([TEXT], Store(tmp_path)) == {TEXT}


@compiles
def test_threads_share_it(libraries, folder):
    compiled_regions.compile_or_load([TEXT], Store(folder))
    given = [torch.full(X.shape, 0.1 * i) for i in range(200)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: compiled_regions.runner_of(TEXT)([x])[0], given))
    torch.testing.assert_close(found, [x.tanh().tanh() for x in given])


@compiles
def test_a_model_trains_as_in_eager_and_its_second_start_compiles_nothing(libraries, folder, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    expected = gradients(model, x)
    torch.testing.assert_close(gradients(fused(model, folder), x), expected)
    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)())
    forget_the_compiler(monkeypatch)
    torch.testing.assert_close(gradients(fused(model, folder), x), expected)


def test_without_a_compiler_operators_run_one_by_one(libraries, tmp_path, monkeypatch):
    forget_the_compiler(monkeypatch)
    model, x = Model(), torch.randn(3, 4)
    with pytest.warns(torch2ort.Torch2OrtWarning) as warned:
        found = gradients(fused(model, tmp_path), x)
    torch.testing.assert_close(found, gradients(model, x))
    assert {str(w.message) for w in warned} == {
        "Options(fuse=True): torch's inductor does not compile a region here (RuntimeError: no g++), so its "
        "operators run one by one. Is there a C++ compiler?"
    }


ELSEWHERE = """
import sys, warnings, torch, torch2ort
from tests.fusion.test_compiled_regions import Model, fused, gradients

torch.manual_seed(0)
model, x = Model(), torch.randn(3, 4)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always", torch2ort.Torch2OrtWarning)
    found = gradients(fused(model, sys.argv[1]), x)
torch.testing.assert_close(found, gradients(model, x))
print(*(w.message for w in warned if w.category is torch2ort.Torch2OrtWarning), sep="\\n")
"""


def without_programs(folder, **environment):
    """Return the warnings of a process with an empty PATH, which has no compiler."""
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder],
        env={
            **os.environ,
            "PATH": str(folder / "none"),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.strip().splitlines())


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no path"),
        pytest.param({"CXX": "/nonexistent"}, marks=pytest.mark.long, id="no such compiler"),
    ],
)
def test_where_no_compiler_is_operators_run_one_by_one(environment, tmp_path):
    (said,) = without_programs(tmp_path, **environment)
    assert re.fullmatch(
        r"Options\(fuse=True\): torch's inductor does not compile a region here \(InductorError: "
        r"InvalidCxxCompiler: .*\), so its operators run one by one\. Is there a C\+\+ compiler\?",
        said,
    )


@compiles
@pytest.mark.long
def test_where_no_compiler_is_libraries_that_are_kept_are_loaded(libraries, tmp_path):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    gradients(fused(model, tmp_path), x)
    assert without_programs(tmp_path) == set()


@compiles
@pytest.mark.long
def test_a_sum_that_pytorch_rounds_on_the_way_may_be_exact(libraries, folder):
    torch.manual_seed(0)
    given = [torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()]
    weights = [torch.randn(64).bfloat16(), torch.zeros(64).bfloat16()]
    statistics = torch.native_layer_norm(given[1], [64], *weights, 1e-5)[1:]
    arguments = [{"tensor": 0}, {"tensor": 1}, [64], *({"tensor": i} for i in (2, 3, 4, 5))]
    backward = torch.ops.aten.native_layer_norm_backward.default
    call = encode_call(backward, [*arguments, [True, True, False]], {}, random=False)
    tensors = [*given, *statistics, *weights]
    shapes = [(t.dtype, t.shape) for t in tensors]
    text = encode_region(shapes, [(TANH, [0], ()), (call, [6, 1, 2, 3, 4, 5], ())], [7, 8])
    assert compiled_regions.compile_or_load([text], Store(folder)) == {text}
    found, expected = compiled_regions.runner_of(text)(list(tensors)), decode_region(text).run(tensors)
    exact = decode_region(in_float32(text)).run([t.float() for t in tensors])
    assert torch.equal(found[0], expected[0])
    errors = [(t.float() - exact[1]).abs().max() for t in (found[1], expected[1])]
    assert errors[0] < errors[1]


def test_a_library_that_computes_something_else_is_not_used(libraries, monkeypatch):
    made = {
        TEXT: compile.CompiledRegion(lambda tensors: [tensors[0] + 1], compile.EntryContent({}, {})),
        OTHER: compile.CompiledRegion(decode_region(OTHER).run, compile.EntryContent({}, {})),
    }
    monkeypatch.setattr(compiled_regions, "compile_regions", lambda texts: made)
    with pytest.warns(torch2ort.Torch2OrtWarning) as warned:
        assert compiled_regions.compile_or_load([TEXT, OTHER], None) == {OTHER}
    assert str(warned[0].message) == (
        "Options(fuse=True): a compiled region is not used, as its output 0 differs from that of PyTorch's "
        "kernels."
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (fails, "run raised RuntimeError: no g++\nand more"),
        (lambda tensors: [], "outputs are 0, not 1"),
        (lambda tensors: [tensors[0].tanh().tanh().double()],
         "output 0 has another type, shape or layout than that of PyTorch's kernels"),
        (lambda tensors: [tensors[0].tanh().tanh().nan_to_num()],
         "output 0 differs from that of PyTorch's kernels"),
    ],
)  # fmt: skip
def test_how_a_library_differs_is_said(run, said):
    assert difference(TEXT, run) == said


def test_a_region_that_nobody_compiled_is_refused(libraries):
    with pytest.raises(EngineError) as error:
        compiled_regions.runner_of(TEXT)
    assert str(error.value) == (
        "a fused region of the graph is not compiled in this process. Delete the export cache, or set "
        "Options(fuse=False)"
    )


def _call(operator, *arguments):
    return encode_call(operator, list(arguments), {}, random=False)


ROWS = [(torch.float32, (4, 8))]
SINE = _call(torch.ops.aten.sin.default, {"tensor": 0})
TIMES_0 = _call(torch.ops.aten.mul.Tensor, {"tensor": 0}, 0.0)
PLUS = _call(torch.ops.aten.add.Tensor, {"tensor": 0}, {"tensor": 1})
GELU = _call(torch.ops.aten.gelu.default, {"tensor": 0})
NORM = _call(torch.ops.aten.native_layer_norm.default, {"tensor": 0}, [8], None, None, 1e-5)


def test_code_that_drops_what_is_multiplied_by_zero_is_not_used():
    text = encode_region(ROWS, [(SINE, [0], ()), (TIMES_0, [1], ()), (PLUS, [2, 0], ())], [3])
    says = "output 0 differs from that of PyTorch's kernels of infinite numbers"
    assert (
        difference(text, lambda tensors: [tensors[0] + torch.where(tensors[0].isnan(), tensors[0], 0)])
        == says
    )


def test_a_gelu_of_infinity_is_that_of_pytorchs_own_kernel():
    text = encode_region(ROWS, [(GELU, [0], ())], [1])
    assert difference(text, lambda tensors: [tensors[0] * 0.5 * (1 + torch.erf(tensors[0] * 0.5**0.5))]) == ""


def test_the_mean_of_a_row_with_an_infinity_is_no_number_of_either_kind():
    def by_sums(tensors):
        mean = tensors[0].sum(1, keepdim=True) / 8
        away = tensors[0] - mean
        rstd = torch.rsqrt(away.square().sum(1, keepdim=True) / 8 + 1e-5)
        return [away * rstd, mean, rstd]

    assert difference(encode_region(ROWS, [(NORM, [0], ())], [1, 2, 3]), by_sums) == ""
