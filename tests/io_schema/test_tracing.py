"""Data is flattened and built while torch traces a model: tensors are fake then, and sizes symbolic."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.io_schema.nested import Attributes, Batch, Output, same
from torch2ort import io_schema
from torch2ort.errors import SchemaError


class Flat(nn.Module):
    """Calls a model with nested data rebuilt from flat tensors, and flattens what it returns."""

    def __init__(self, model: nn.Module, schema: io_schema.Schema) -> None:
        super().__init__()
        self.model = model
        self._schema = schema

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found, self.output_schema = io_schema.flatten(self.model(io_schema.unflatten(tensors, self._schema)))
        return tuple(found)


class Nested(nn.Module):
    def forward(self, batch: Batch) -> Output:
        return Output(logits=batch.ids * 2, hidden=(batch.mask["m"] + 1, Attributes(n=3, t=batch.ids.sum())))


def export(model: nn.Module, data: Any) -> tuple[Flat, torch.export.ExportedProgram]:
    tensors, schema = io_schema.flatten(data)
    flat = Flat(model, schema)
    dynamic = (tuple({0: torch.export.Dim.DYNAMIC} for _ in tensors),)
    return flat, torch.export.export(flat, tuple(tensors), dynamic_shapes=dynamic, strict=False)


def test_a_model_with_nested_data_is_traced() -> None:
    batch = Batch(torch.randn(3, 2), {"m": torch.ones(4)})
    flat, program = export(Nested(), batch)
    got = io_schema.unflatten(program.module()(batch.ids, batch.mask["m"]), flat.output_schema)
    assert same(got, Nested()(batch), torch.equal)


def test_the_schema_of_fake_tensors_is_that_of_real_ones() -> None:
    batch = Batch(torch.randn(3, 2), {"m": torch.ones(4)})
    flat, _ = export(Nested(), batch)
    assert flat.output_schema == io_schema.flatten(Nested()(batch))[1]


class Size(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "count": [x.shape[0]]}


class Half(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x.shape[0] / 2,)


class Even(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.sym_not(x.shape[0] == 4)


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        (Size(), "data['count'][0]", "torch.SymInt"),
        (Half(), "data[0]", "torch.SymFloat"),
        (Even(), "data", "torch.SymBool"),
    ],
)
def test_a_number_that_depends_on_a_size_cannot_be_an_output(model: nn.Module, path: str, name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        export(model, torch.ones(3, 2))
    assert str(caught.value) == (
        f"{path}: expected a tensor, got a {name}: a Python number that depends on a tensor's size or data "
        "cannot be an output. Return it as a tensor, or do not return it."
    )


@pytest.mark.parametrize(
    "tensor",
    [
        nn.Parameter(torch.ones(2, 3)),
        nn.Buffer(torch.ones(2, 3)),
        torch.ones(2, 3, device="meta"),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3).as_subclass(type("Mine", (Tensor,), {})),
    ],
)
def test_every_kind_of_tensor_is_a_tensor(tensor: Tensor) -> None:
    (found,), schema = io_schema.flatten([tensor])
    assert found is tensor
    assert schema == io_schema.flatten([torch.ones(2, 3)])[1]


def test_a_tensor_subclass_matches_a_plain_tensor() -> None:
    _, schema = io_schema.flatten([torch.ones(2)])
    tensor = torch.ones(2).as_subclass(type("Mine", (Tensor,), {}))
    matched = schema.match([tensor])
    assert matched is not None
    assert matched[0] is tensor


def test_threads_may_flatten_at_once() -> None:
    data = [{f"x{i}": torch.ones((1,) * (i % 4)), "n": i} for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(io_schema.flatten, data * 5))
    for index, (tensors, schema) in enumerate(results):
        assert same(io_schema.unflatten(tensors, schema), data[index % 40], lambda a, b: a is b)
