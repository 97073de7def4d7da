"""A file records the source lines of its nodes, and nothing of the machine that made it."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import onnx
import pytest
import torch

import torch2ort
from tests.models.test_convolutional import ConvNet
from torch2ort.graph.graph_traversal import graphs_in
from torch2ort.graph.node_provenance import Origin
from torch2ort.graph.portable_paths import portable_path

ROOT = Path(__file__).parents[2]


def texts(model: onnx.ModelProto) -> list[str]:
    """All metadata of a file."""
    nodes = [node for graph in (*graphs_in(model.graph), *model.functions) for node in graph.node]
    return [prop.value for owner in (model, *nodes) for prop in owner.metadata_props]


def test_no_metadata_of_a_file_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    folders = {str(ROOT), str(Path.home()), sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__)}
    module = torch2ort.ORTModule(ConvNet().eval())
    module(torch.randn(2, 3, 12, 12))
    exported = torch2ort.export(ConvNet().eval(), torch.randn(2, 3, 12, 12))
    exported.save(tmp_path / "model.onnx")
    for model in (exported.proto, module.exported.proto, onnx.load(tmp_path / "model.onnx")):
        found = texts(model)
        assert any("convolutional.py" in text for text in found)
        assert [text for text in found if any(f"{folder}/" in text for folder in folders)] == []


def test_a_node_still_knows_the_users_line() -> None:
    exported = torch2ort.export(ConvNet().eval(), torch.randn(2, 3, 12, 12))
    lines = {Origin.of(node).line for node in exported.proto.graph.node if node.op_type == "Conv"}
    first = ConvNet.forward.__code__.co_firstlineno
    assert lines == {f"tests/models/test_convolutional.py:{first + line}" for line in (1, 3)}


@pytest.mark.parametrize(
    ("file", "path"),
    [
        (str(ROOT / "tests" / "graph" / "test_costs.py"), "tests/graph/test_costs.py"),
        (torch.nn.functional.__file__, "site-packages/torch/nn/functional.py"),
        (torch2ort.__file__, "site-packages/torch2ort/__init__.py"),
        (os.__file__, "python/os.py"),
        ("/elsewhere/project/model.py", "model.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_a_path_begins_where_python_imports_from(file: str, path: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert portable_path(file) == path
