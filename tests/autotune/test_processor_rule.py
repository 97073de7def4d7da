"""The rule by processor, and steps whose operators PyTorch's kernels compute by it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.differentiate.test_fuse_regions import Of, step
from torch2ort.autotune import calibration, processor_rule
from torch2ort.autotune.processor_rule import KINDS, faster_in_kernels

EVERY = frozenset().union(*KINDS.values())


@pytest.fixture
def every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernels compute all kinds of operators."""
    monkeypatch.setattr(calibration, "faster_in_kernels", lambda: EVERY)


@pytest.mark.parametrize(
    ("vendor", "features", "kinds"),
    [
        ("GenuineIntel", {"avx2", "avx512f"}, ["products", "convolutions", "GELU"]),
        ("GenuineIntel", {"avx2"}, []),
        ("AuthenticAMD", {"avx2", "avx512f"}, []),
        ("", {"asimd"}, []),
    ],
    ids=["Intel with AVX-512", "Intel without", "AMD", "ARM"],
)
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_the_rule_depends_on_the_processor(vendor, features, kinds, monkeypatch):
    monkeypatch.setattr(processor_rule, "vendor", lambda: vendor)
    monkeypatch.setattr(processor_rule, "has_feature", features.__contains__)
    faster_in_kernels.cache_clear()
    found = faster_in_kernels()
    faster_in_kernels.cache_clear()
    assert found == frozenset().union(*(KINDS[kind] for kind in kinds))


class Pictures(nn.Module):
    """Convolutions of 32 channels and more, with pools, a normalisation and a sum between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 40, 3, padding=1)
        self.last = nn.Linear(40, 5)

    def forward(self, x):
        y = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        z = F.max_pool2d(self.second(y), 3, stride=2, padding=1, dilation=1)
        return self.last(F.gelu(z).mean((2, 3))), y


PICTURES, LAST = torch.randn(2, 3, 12, 16), torch.channels_last


def kernels(module: torch2ort.ORTModule, x: torch.Tensor) -> set[str]:
    step(module, x)
    with module.profile(1) as taken:
        step(module, x)
    return {row.name.removeprefix("torch.ops.aten.") for row in taken.functions}


@pytest.mark.usefixtures("every_kind")
def test_products_of_transposed_matrices_are_read_as_they_lie(tmp_path):
    model, x = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 80)), torch.randn(48, 96)
    module = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(save_onnx_dir=tmp_path))
    torch.testing.assert_close(step(module, x), step(copy.deepcopy(model), x))
    assert {"addmm", "mm", "gelu", "gelu_backward"} <= kernels(module, x)
    import onnx

    graphs = [onnx.load(file).graph for file in tmp_path.glob("*_optimized.onnx")]
    assert graphs
    assert not [node for graph in graphs for node in graph.node if node.op_type in ("Transpose", "Gemm")]


@pytest.mark.usefixtures("every_kind")
def test_small_operators_stay_in_onnx_runtime():
    model, x = nn.Linear(8, 6), torch.randn(4, 8)
    assert kernels(torch2ort.ORTModule(model), x) == set()


@pytest.mark.usefixtures("every_kind")
def test_sizes_that_vary_follow_the_rule():
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 80))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for rows in (48, 50, 1, 47):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(step(module, x), step(copy.deepcopy(model), x))
    assert {"addmm", "mm", "gelu"} <= kernels(module, torch.randn(49, 96))


@pytest.mark.usefixtures("every_kind")
def test_images_lie_channels_last_by_the_rule():
    model = Pictures()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    # Sums are added up in the order of eager PyTorch in this layout.
    other = copy.deepcopy(model).to(memory_format=LAST)
    torch.testing.assert_close(step(module, PICTURES), step(other, PICTURES.to(memory_format=LAST)))
    assert {"max_pool2d_with_indices", "max_pool2d_with_indices_backward"} <= kernels(module, PICTURES)


@pytest.mark.usefixtures("every_kind")
def test_a_pools_gradient_goes_to_the_first_of_equal_numbers():
    model = Of(lambda m, x: F.max_pool2d(m.a(x).round(), 2), a=nn.Conv2d(3, 32, 3, padding=1))
    x = torch.randn(2, 3, 12, 16)
    x[1, :, 3] = torch.nan
    torch.testing.assert_close(
        step(torch2ort.ORTModule(copy.deepcopy(model)), x), step(copy.deepcopy(model), x), equal_nan=True
    )


@pytest.mark.usefixtures("every_kind")
@pytest.mark.parametrize("mode", ["default", "max"])
def test_batches_of_images_may_vary(mode):
    model = Pictures()
    module = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(mode=mode, fuse=False))
    for count in (2, 3, 1):
        x = torch.randn(count, 3, 12, 16)
        torch.testing.assert_close(step(module, x), step(model, x), rtol=1e-4, atol=1e-4)


NETS = {
    "a transformer's layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        (4, 16, 32),
    ),
    "images": (Pictures, (2, 3, 12, 16)),
    "a loss": (lambda: Of(lambda m, x: m.a(x).log_softmax(-1).mean(), a=nn.Linear(64, 96)), (48, 64)),
}


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [list(KINDS)], ids="+".join)
@pytest.mark.parametrize(("make", "shape"), NETS.values(), ids=NETS)
def test_a_step_is_eagers_whichever_library_computes(make, shape, kinds, monkeypatch):
    names = frozenset(itertools.chain.from_iterable(KINDS[kind] for kind in kinds))
    monkeypatch.setattr(calibration, "faster_in_kernels", lambda: names)
    model, x = make(), torch.randn(shape)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    torch.testing.assert_close(step(module, x), step(model, x), rtol=1e-4, atol=1e-4)
