"""options={"cache_dir": ...}: a graph that another process compiled is not translated again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same

pytestmark = pytest.mark.joint("the other engine has no part in torch.compile")


def step(function, folder: Path, *sizes: int, dynamic: bool = False):
    """Output and gradient of a graph that is compiled anew, and whether its halves came out of the cache."""
    torch.compiler.reset()
    faster = torch.compile(function, backend="torch2ort", dynamic=dynamic, options={"cache_dir": folder})
    torch.manual_seed(5)
    x = torch.randn(sizes, requires_grad=True)
    output = faster(x)
    output.square().sum().backward()
    halves = [half for graph in torch2ort.compile_report().graphs for half in graph.halves]
    return (output.detach(), x.grad), [half.cached for half in halves]


def layer(factor):
    return lambda x: F.dropout(F.gelu(x.cumsum(0)), 0.3) * factor * x.shape[0] + torch.tensor([1.0, factor])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_second_time_nothing_is_translated(tmp_path: Path, dynamic: bool) -> None:
    first, translated = step(layer(2.0), tmp_path, 3, 2, dynamic=dynamic)
    second, again = step(layer(2.0), tmp_path, 3, 2, dynamic=dynamic)
    assert (translated, again) == ([False, False], [True, True])
    assert_same(second, first, "output and gradient")


def test_another_number_size_or_setting_is_another_graph(tmp_path: Path) -> None:
    step(layer(2.0), tmp_path, 3, 2)
    assert step(layer(4.0), tmp_path, 3, 2)[1] == [False, False]
    assert step(layer(2.0), tmp_path, 4, 2)[1] == [False, False]


def test_a_graph_that_calls_what_stays_whole_is_not_kept(tmp_path: Path) -> None:
    def function(x):
        return x.prod().expand(2)

    for _ in range(2):
        assert step(function, tmp_path, 3)[1] == [False, False]


@pytest.mark.parametrize(
    ("name", "kept"), [("mkldnn::_is_mkldnn_bf16_supported", True), ("aten::cumsum", False)]
)
def test_what_a_function_of_this_process_translates_is_not_kept(
    tmp_path: Path, name: str, kept: bool
) -> None:
    """A translation of an operator that is not in the graph does not matter."""
    torch2ort.register_symbolic(name, lambda g, x, dim, dtype=None: None)
    try:
        for expected in (False, kept):
            assert step(layer(2.0), tmp_path, 3, 2)[1][0] is expected
    finally:
        torch2ort.unregister(name)
