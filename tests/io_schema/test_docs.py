"""The table in docs/io_schema.md is true."""

from __future__ import annotations

import ast
import re
from collections import OrderedDict, UserList, defaultdict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optree
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tests.io_schema.nested import Batch, Point
from torch2ort import io_schema

PAGE = Path(__file__).parents[2] / "docs" / "io_schema.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \| .+ \|$", PAGE.read_text(), flags=re.MULTILINE)


class Box:
    def __init__(self, item: Any, label: str) -> None:
        self.item = item
        self.label = label


optree.register_pytree_node(
    Box,
    lambda box: ((box.item,), box.label, ("item",)),
    lambda label, items: Box(*items, label),
    namespace="torch2ort",
)

NAMESPACE = {
    **{cls.__name__: cls for cls in (OrderedDict, UserList, defaultdict, deque)},
    **{cls.__name__: cls for cls in (BaseModelOutput, Batch, Box, Point)},
    "MappingProxyType": MappingProxyType,
    "torch": torch,
    "t": torch.ones(2, 2),
}


def test_the_table_has_a_row_for_each_kind_of_container() -> None:
    assert len(ROWS) == 13


@pytest.mark.parametrize(("example", "names"), ROWS)
def test_the_tensors_have_the_names_of_the_table(example: str, names: str) -> None:
    _, schema = io_schema.flatten(eval(example, NAMESPACE))
    assert [leaf.name for leaf in schema.leaves] == [
        ast.literal_eval(name.strip("`")) for name in names.split(", ")
    ]


@pytest.mark.parametrize("example", [example for example, _ in ROWS])
def test_what_comes_back_has_the_class_that_was_given(example: str) -> None:
    data = eval(example, NAMESPACE)
    tensors, schema = io_schema.flatten(data)
    assert type(io_schema.unflatten(tensors, schema)) is type(data)
