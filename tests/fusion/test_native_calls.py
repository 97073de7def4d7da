"""A node calls a region's library in C++: on the runtime's memory, without Python, the GIL or torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading

import pytest
import torch

from tests.stock.single_op_session import OneNode
from tests.support.memory import resident_bytes
from torch2ort.errors import EngineError
from torch2ort.fusion import compiled_regions
from torch2ort.fusion.cpp_source import CppProgram
from torch2ort.fusion.library_loader import loaded
from torch2ort.fusion.region import decode_region, encode_region
from torch2ort.fusion.region_function import FusedRegion
from torch2ort.kernels.functions import encode_call
from torch2ort.pythonop.native import native
from torch2ort.sizes.expressions import parse

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="libraries are compiled with g++"),
    pytest.mark.timeout(600),
]

aten = torch.ops.aten
# Handwritten code in the form that source.py writes: functions of one input of six floats, with two outputs,
# six floats and six bools.
LIBRARY = """
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#define SEEN extern "C" __attribute__((visibility("default")))
#define ENTRY SEEN int32_t
ENTRY twice(char* const* memory, const int64_t*) {
  auto* x = reinterpret_cast<float*>(memory[0]);
  auto* y = reinterpret_cast<float*>(memory[1]);
  auto* is_nan = reinterpret_cast<bool*>(memory[2]);
  auto* between = reinterpret_cast<float*>(memory[3]);
  for (int i = 0; i < 6; ++i) between[i] = 2 * x[i];
  for (int i = 0; i < 6; ++i) is_nan[i] = between[i] != between[i];
  std::memcpy(y, between, 24);
  return 0;
}
ENTRY has_lock(char* const* memory, const int64_t*) {
  auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  for (int i = 0; i < 6; ++i) reinterpret_cast<float*>(memory[1])[i] = check == nullptr ? -1 : check();
  return 0;
}
ENTRY fail(char* const*, const int64_t*) { return 1; }
ENTRY rows(char* const* memory, const int64_t* sizes) {
  auto* x = reinterpret_cast<float*>(memory[0]);
  auto* between = reinterpret_cast<float*>(memory[3]);
  for (int64_t i = 0; i < 3 * sizes[0]; ++i) between[i] = 2 * x[i];
  for (int64_t i = 0; i < 3 * sizes[0]; ++i) memory[2][i] = between[i] != between[i];
  std::memcpy(memory[1], between, 12 * sizes[0]);
  return 0;
}
SEEN void rows_numbers(const int64_t* sizes, int64_t* numbers) {
  const int64_t found[] = {sizes[0], 3, sizes[0], 3, sizes[0], 3, 12 * sizes[0]};
  std::memcpy(numbers, found, sizeof(found));
}
"""
X = torch.tensor([[0.5, -2.0, float("nan")], [-0.0, 3e38, float("-inf")]])


def call(operator, *arguments):
    return encode_call(operator, arguments, {}, random=False)


# The computation of `twice` as a region's text.
DOUBLED, IS_NAN = call(aten.mul.Tensor, {"tensor": 0}, 2), call(aten.ne.Tensor, {"tensor": 0}, {"tensor": 1})
TWICE = encode_region([(torch.float32, (2, 3))], [(DOUBLED, [0], ()), (IS_NAN, [1, 1], ())], [1, 2])

# The same for any number of rows.
ROWS = encode_region([(torch.float32, (parse("n0"), 3))], [(DOUBLED, [0], ()), (IS_NAN, [1, 1], ())], [1, 2])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    (folder / "region.cpp").write_text(LIBRARY)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", folder / "region.so", folder / "region.cpp", "-ldl"], check=True
    )
    return (folder / "region.so").read_bytes()


@pytest.fixture
def region(written, monkeypatch):
    """A node that calls a function of the library, known as the region ``TWICE``."""

    def node(entry="twice", temporaries=(24,), read=None):
        program = CppProgram(entry, ((torch.float32, (2, 3)), (torch.bool, (2, 3))), temporaries)
        known = {TWICE: loaded(written, decode_region(TWICE), program)}
        monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)(known))
        return OneNode(FusedRegion, TWICE, [X], decode_region(TWICE).run([X]), read)

    return node


def test_it_gives_the_librarys_bits_and_python_is_called_once(region):
    node = region()
    assert node.is_direct
    for x in (X, X, X * 3):
        y, is_nan = node(x)
        assert torch.equal(y.view(torch.int32), (2 * x).view(torch.int32))
        assert torch.equal(is_nan, x.isnan())
    assert node.python_calls == 1


def test_the_thread_that_runs_it_has_not_pythons_lock(region):
    node = region("has_lock", ())
    node(X)
    assert torch.equal(node(X)[0], torch.zeros(2, 3))


def test_it_is_called_on_the_cpu_wherever_else_tensors_are_made(region):
    node = region()
    with torch.device("meta"):
        y, is_nan = compiled_regions.runner_of(TWICE)([X])
        assert len(decode_region(TWICE).samples(torch.Generator().manual_seed(0))[0].tolist()) == 2
    assert torch.equal(is_nan, X.isnan())
    assert torch.equal(y.nan_to_num(), node(X)[0].nan_to_num())


def test_outputs_that_nobody_reads_have_memory_all_the_same(region):
    node = region(read=[False, True])
    for _ in range(3):
        (is_nan,) = node(X)
        assert torch.equal(is_nan, X.isnan())
    assert node.python_calls == 1


def test_threads_call_it_at_once(region):
    node = region()
    node(X)
    wrong = []

    def run(scale):
        for _ in range(100):
            y, _ = node(torch.full((2, 3), scale))
            if not torch.equal(y, torch.full((2, 3), 2 * scale)):
                wrong.append(y)

    threads = [threading.Thread(target=run, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_function_that_gives_up_is_an_error(region):
    node = region("fail")
    for _ in range(2):
        with pytest.raises(EngineError) as error:
            node(X)
        assert str(error.value) == "a fused region failed. With Options(fuse=False) operators run one by one"


def refusal(sizes: tuple[int, ...], wanted: str) -> str:
    """The message for a tensor of other sizes than the wanted ones."""
    return (
        f"tensor 0 of a fused region is torch.float32 of shape {list(sizes)}, but it was compiled for "
        f"torch.float32 of shape {wanted}, contiguous. A Function of the model returned another shape or "
        f"type than when it was exported. With Options(fuse=False) operators run one by one"
    )


@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (1, 3), (0, 3), (2, 0)])
def test_other_sizes_than_it_was_compiled_for_are_refused(region, sizes):
    node = region()
    node(X)
    for _ in range(2):
        with pytest.raises(EngineError) as error:
            node(torch.zeros(sizes))
        assert str(error.value) == refusal(sizes, "[2, 3]")
    calls = node.python_calls
    assert torch.equal(node(X)[1], X.isnan())
    assert node.python_calls == calls


@pytest.fixture
def rows(written, monkeypatch):
    """A node that calls a function for any number of rows, known as the region ``ROWS``."""
    outputs = ((torch.float32, (parse("n0"), 3)), (torch.bool, (parse("n0"), 3)))
    program = CppProgram("rows", outputs, (12 * parse("n0"),))
    known = {ROWS: loaded(written, decode_region(ROWS), program)}
    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)(known))
    return OneNode(FusedRegion, ROWS, [X], decode_region(ROWS).run([X]))


def test_sizes_that_vary_are_told_to_the_library(rows):
    assert rows.is_direct
    for count in (2, 5, 3, 1000, 2):
        x = torch.randn(count, 3)
        x[1, 2] = float("nan")
        y, is_nan = rows(x)
        assert torch.equal(y[0], 2 * x[0])
        assert torch.equal(is_nan, x.isnan())
    assert rows.python_calls == 1


@pytest.mark.parametrize("count", [0, 1])
def test_sizes_below_two_run_call_by_call_in_pytorchs_kernels(rows, count):
    rows(X)
    calls = rows.python_calls
    y, is_nan = rows(X[:count])
    torch.testing.assert_close((y, is_nan), (2 * X[:count], X[:count].isnan()), equal_nan=True)
    assert rows.python_calls == calls + 1


@pytest.mark.parametrize("sizes", [(2, 4), (2, 1), (5, 0)])
def test_sizes_that_do_not_fit_those_that_vary_are_refused(rows, sizes):
    rows(X)
    with pytest.raises(EngineError) as error:
        rows(torch.zeros(sizes))
    assert str(error.value) == refusal(sizes, "[n0, 3]")


def test_results_outlive_the_session(region):
    node = region()
    node(X)
    y, is_nan = node(X)
    del node
    assert torch.equal(is_nan, X.isnan())
    assert torch.equal(y.isnan(), X.isnan())


def test_memory_in_between_is_freed(region):
    node = region(temporaries=(2**24,))
    for _ in range(3):
        node(X)
    before = resident_bytes()
    for _ in range(50):
        node(X)
    assert resident_bytes() - before < 2**24


def test_what_no_node_can_call_runs_in_python(monkeypatch):
    known = {TWICE: decode_region(TWICE).run}
    monkeypatch.setattr(compiled_regions, "_LIBRARIES", type(compiled_regions._LIBRARIES)(known))
    node = OneNode(FusedRegion, TWICE, [X], decode_region(TWICE).run([X]))
    assert not node.is_direct
    assert torch.equal(node(X)[1], X.isnan())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"address": 0}, "a region has no function"),
        ({"inputs": []}, "DirectCall: the region's tensors are not the site's"),
        ({"outputs": [(2, 3)]}, "DirectCall: the region's tensors are not the site's"),
        ({"outputs": [(2, 3), (6,)]}, "DirectCall: the region's tensors are not the site's"),
        ({"inputs": [(-2, 3)]}, "a size is negative"),
        ({"inputs": [[2, 3]]}, "the sizes of a tensor are a tuple"),
        ({"temporaries": [-2]}, "a size is negative"),
        ({"temporaries": [-1]}, "a region's sizes vary, and nothing tells them"),
        ({"inputs": [(-1, 3)], "numbers": 1}, "a region's sizes vary, and nothing tells them"),
        ({"varying": [0]}, "the place of a size is a tuple of an input and a dimension"),
        ({"varying": [(1, 0)]}, "a size stands at no dimension of an input"),
        ({"varying": [(0, 2)]}, "a size stands at no dimension of an input"),
    ],
)
def test_a_call_that_is_not_the_sites_is_refused(region, changed, said):
    site = region().site
    arguments = {"address": 1, "inputs": [(2, 3)], "outputs": [(2, 3), (2, 3)], "temporaries": []}
    arguments |= {"numbers": 0, "varying": []}
    with pytest.raises(ValueError, match=f"^{said}$"):
        native.DirectCall.of_region(site=site, **{**arguments, **changed})


def test_a_site_of_other_types_is_not_called_in_c(region):
    region()
    text = json.loads(TWICE)
    text["inputs"] = [["bfloat16", [2, 3]]]
    other = json.dumps(text, sort_keys=True)
    compiled_regions._LIBRARIES.loaded[other] = compiled_regions._LIBRARIES.loaded[TWICE]
    example = [X.bfloat16()]
    assert not OneNode(FusedRegion, other, example, decode_region(other).run(example)).is_direct
