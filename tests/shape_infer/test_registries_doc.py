"""The table of ``docs/registries.md`` agrees with exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import torch2ort
from tests.ops.snippets import TORCH_2_11
from tests.shape_infer.test_inferers import Model, Repeat, output_of, repeat, shapes_of

PAGE = Path(__file__).parents[2] / "docs" / "registries.md"
ROW = r"^\| `(.*?)` \|\s*(.*?)\s*\|\s*(.*?)\s*\| (\d+) \| (\d+) \| `\[(.*)\]` \|$"
ROWS = re.findall(ROW, PAGE.read_text(), re.MULTILINE)
NAMES = [row[0] for row in ROWS]
# torch 2.11 has a symbol of its own for the length of a slice with such an end.
NAMED_ANEW = {"x[: n // 2]"} if TORCH_2_11 else set()


def export(code):
    call = eval(f"lambda x, n: {code}", {"torch": torch, "F": torch.nn.functional})
    shapes = {"x": {0: Dim("batch", min=2, max=1000)}}
    return torch2ort.export(
        Model(lambda x: call(x, x.shape[0])).eval(), torch.randn(3, 4), dynamic_shapes=shapes
    )


def counts(exported):
    """Nodes, and symbols that torch or onnx-shape-inference made up."""
    sizes = [d for shape in shapes_of(exported).values() for d in shape if isinstance(d, str)]
    made_up = {name for size in sizes for name in re.findall(r"\b(?:u|_d|size_)\d+\b", size)}
    return len(exported.proto.graph.node), len(made_up)


def test_the_table_is_there():
    assert len(ROWS) == 8


@pytest.mark.parametrize(("code", "nodes", "symbols"), [row[:3] for row in ROWS], ids=NAMES)
def test_without_an_inferer(code, nodes, symbols):
    if nodes == "refused":
        with pytest.raises(torch2ort.ExportError):
            export(code)
    else:
        assert counts(export(code)) == (int(nodes), int(symbols) + (code in NAMED_ANEW))


@pytest.mark.parametrize(
    ("code", "nodes", "symbols", "output"),
    [(row[0], *row[3:]) for row in ROWS],
    ids=NAMES,
)
def test_with_an_inferer(code, nodes, symbols, output):
    torch2ort.register_shape_inferer(Repeat, repeat)
    exported = export(code)
    assert counts(exported) == (int(nodes), int(symbols))
    assert ", ".join(map(str, output_of(exported))) == output
