"""A node calls a region's library in C++: with memory of the runtime, without Python, its lock or torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading

import pytest
import torch

from tests.stock.one_call import OneNode
from tests.support.memory import resident_bytes
from torch2ort.errors import EngineError
from torch2ort.kernels.functions import encode_call
from torch2ort.kernels.regions import library
from torch2ort.kernels.regions.function import FusedRegion
from torch2ort.kernels.regions.region import decode_region, encode_region
from torch2ort.kernels.regions.shared import loaded
from torch2ort.kernels.regions.source import Program
from torch2ort.pythonop.native import native

pytestmark = [
    pytest.mark.joint("regions are a part of its graphs"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="libraries are compiled with g++"),
    pytest.mark.timeout(600),
]

aten = torch.ops.aten
# What source.py writes, by hand: functions of one input of six floats and two outputs, six floats and bools.
LIBRARY = """
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#define ENTRY extern "C" __attribute__((visibility("default"))) int32_t
ENTRY twice(char* const* memory) {
  auto* x = reinterpret_cast<float*>(memory[0]);
  auto* y = reinterpret_cast<float*>(memory[1]);
  auto* is_nan = reinterpret_cast<bool*>(memory[2]);
  auto* between = reinterpret_cast<float*>(memory[3]);
  for (int i = 0; i < 6; ++i) between[i] = 2 * x[i];
  for (int i = 0; i < 6; ++i) is_nan[i] = between[i] != between[i];
  std::memcpy(y, between, 24);
  return 0;
}
ENTRY has_lock(char* const* memory) {
  auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  for (int i = 0; i < 6; ++i) reinterpret_cast<float*>(memory[1])[i] = check == nullptr ? -1 : check();
  return 0;
}
ENTRY fail(char* const*) { return 1; }
"""
X = torch.tensor([[0.5, -2.0, float("nan")], [-0.0, 3e38, float("-inf")]])


def call(operator, *arguments):
    return encode_call(operator, arguments, {}, random=False)


# As text what `twice` computes.
DOUBLED, IS_NAN = call(aten.mul.Tensor, {"tensor": 0}, 2), call(aten.ne.Tensor, {"tensor": 0}, {"tensor": 1})
TWICE = encode_region([X], [(DOUBLED, [0]), (IS_NAN, [1, 1])], [1, 2])


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
        program = Program(entry, ((torch.float32, (2, 3)), (torch.bool, (2, 3))), temporaries)
        known = {TWICE: loaded(written, decode_region(TWICE), program)}
        monkeypatch.setattr(library, "_LIBRARIES", type(library._LIBRARIES)(known))
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
        y, is_nan = library.library_of(TWICE)([X])
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


@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (1, 3), (0, 3), (2, 0)])
def test_other_sizes_than_it_was_compiled_for_are_refused(region, sizes):
    node = region()
    node(X)
    for _ in range(2):
        with pytest.raises(EngineError) as error:
            node(torch.zeros(sizes))
        assert str(error.value) == (
            f"tensor 0 of a fused region is torch.float32 of shape {list(sizes)}, but it was compiled for "
            f"torch.float32 of shape [2, 3], contiguous. A Function of the model gave another shape or type "
            f"than when it was exported. With Options(fuse=False) operators run one by one"
        )
    calls = node.python_calls
    assert torch.equal(node(X)[1], X.isnan())
    assert node.python_calls == calls


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
    monkeypatch.setattr(library, "_LIBRARIES", type(library._LIBRARIES)(known))
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
        ({"temporaries": [-1]}, "a size is negative"),
    ],
)
def test_a_call_that_is_not_the_sites_is_refused(region, changed, said):
    site = region().site
    arguments = {"address": 1, "inputs": [(2, 3)], "outputs": [(2, 3), (2, 3)], "temporaries": []}
    with pytest.raises(ValueError, match=f"^{said}$"):
        native.DirectCall.of_region(site=site, **{**arguments, **changed})


def test_a_site_of_other_types_is_not_called_in_c(region):
    region()
    text = json.loads(TWICE)
    text["inputs"] = [["bfloat16", [2, 3]]]
    other = json.dumps(text, sort_keys=True)
    library._LIBRARIES.loaded[other] = library._LIBRARIES.loaded[TWICE]
    example = [X.bfloat16()]
    assert not OneNode(FusedRegion, other, example, decode_region(other).run(example)).is_direct
