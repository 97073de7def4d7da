"""``python -m torch2ort show`` draws the calls of Functions and the modules around them."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from xml.etree import ElementTree

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import torch2ort
from tests.support.functions import Square
from torch2ort.__main__ import main
from torch2ort.graph.drawing import drawing

SVG = "{http://www.w3.org/2000/svg}"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return x + Square.apply(self.layer(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.blocks(x)).softmax(-1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("show") / "model.onnx"
    torch2ort.export(Model().eval(), torch.randn(2, 3)).save(path)
    return path


def _boxes(path):
    root = ElementTree.parse(path).getroot()
    rectangles = [(g.find(f"{SVG}rect"), g.find(f"{SVG}text")) for g in root.iter(f"{SVG}g")]
    return [(float(r.get("x")), float(r.get("y")), text.text) for r, text in rectangles]


def test_without_a_file_it_prints_the_modules_and_what_they_run(saved, capsys):
    assert main(["show", str(saved)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the model (Model): Softmax",
        "  blocks",
        "    0 (Block): Add",
        "      calls tests.support.functions.Square",
        "      layer (Linear): Gemm",
        "    1 (Block): Add",
        "      calls tests.support.functions.Square",
        "      layer (Linear): Gemm",
        "  last (Linear): Gemm",
    ]


def test_it_draws_each_call_and_each_module(saved, tmp_path, capsys):
    picture = tmp_path / "graph.svg"
    assert main(["show", str(saved), "-o", str(picture)]) == 0
    names = [name for *_, name in _boxes(picture)]
    assert sorted(names) == sorted(
        [
            *("x", "output", "Square", "Square", "blocks.0 (Block)", "blocks.1 (Block)"),
            *("the model (Model)", "blocks.0.layer (Linear)", "blocks.1.layer (Linear)", "last (Linear)"),
        ]
    )
    assert capsys.readouterr().out == f"8 nodes in 10 boxes drawn in {picture}\n"


def test_boxes_stand_below_what_they_read_and_beside_each_other(saved, tmp_path):
    main(["show", str(saved), "-o", str(tmp_path / "graph.svg")])
    places = _boxes(tmp_path / "graph.svg")
    assert len({(x, y) for x, y, _ in places}) == len(places)
    graph = drawing(onnx.load(saved).graph)
    assert all(graph.boxes[a].level < graph.boxes[b].level for a, b in graph.edges)


def test_large_graphs_are_folded_by_module(saved, tmp_path):
    main(["show", str(saved), "-o", str(tmp_path / "graph.svg"), "--boxes", "9"])
    names = [name for *_, name in _boxes(tmp_path / "graph.svg")]
    assert len(names) <= 9
    assert "blocks" in names
    assert "Square" in names


def test_a_page_and_graphviz_have_the_same_boxes(saved, tmp_path):
    for suffix in ("html", "dot"):
        main(["show", str(saved), "-o", str(tmp_path / f"graph.{suffix}")])
    assert (tmp_path / "graph.html").read_text().count("<details>") == 8
    dot = (tmp_path / "graph.dot").read_text()
    assert dot.startswith("digraph model {")
    assert dot.count("label=") == 10


def test_graphs_of_anybody_are_drawn(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    path = tmp_path / "other.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", values[:1], values[1:])), path)
    assert main(["show", str(path), "-o", str(tmp_path / "other.svg")]) == 0
    assert [name for *_, name in _boxes(tmp_path / "other.svg")] == ["x", "the model", "y"]


def test_a_file_that_is_not_there_is_an_error(tmp_path, capsys):
    path = tmp_path / "none.onnx"
    assert main(["show", str(path)]) == 1
    assert capsys.readouterr().err == f"{path}: there is no such file\n"


def test_another_kind_of_picture_is_an_error(saved, capsys):
    assert main(["show", str(saved), "-o", "graph.bmp"]) == 1
    expected = "-o graph.bmp: the suffix is '.bmp'; expected one of .svg, .html, .dot\n"
    assert capsys.readouterr().err == expected


def test_version_names_what_it_stands_on():
    done = subprocess.run(
        [sys.executable, "-m", "torch2ort", "--version"], capture_output=True, text=True, timeout=100
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("torch2ort ")
    # As pip names it; a build of one's own calls itself 2.15.0+cu132.
    assert f"torch {metadata.version('torch')}" in line
    assert "onnxruntime" in line


def test_a_portable_function_is_one_node_that_opens(tmp_path):
    path, page = tmp_path / "model.onnx", tmp_path / "model.html"
    torch2ort.export(Model().eval(), torch.randn(2, 3), portable=True).save(path)
    assert main(["show", str(path), "-o", str(page)]) == 0
    boxes = page.read_text().split("<details>")
    opened = [box for box in boxes if box.startswith("<summary>Square: ")]
    assert len(opened) == 2
    assert all("Square Square_" in box and "\n  Mul " in box for box in opened)


def test_the_outline_lists_calls_of_portable_functions(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    torch2ort.export(Model().eval(), torch.randn(2, 3), portable=True).save(path)
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.count("calls tests.support.functions.Square") == 2
