"""A name in dynamic_shapes gets the bounds that the model needs, and reports them."""

import logging

import pytest
import torch

import torch2ort


class Calls(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.call = call

    def forward(self, x):
        return self.call(self.layer(x))


def columns(h):
    return torch.softmax(h.view(h.size(1), -1), 0)


def windows(h):
    return h.unfold(0, 3, 1)


def without_three(h):
    return h[3:]


X = torch.randn(10, 4, 6)
CASES = {
    columns: ("2 <= n and size(0, 0) != 4 and (size(0, 0) % 4) != 0", 7, 8),
    windows: ("3 <= n and size(0, 0) >= 3", 3, 2),
}


def first_sizes(exported):
    sizes = exported.proto.graph.input[0].type.tensor_type.shape.dim
    return [size.dim_param or size.dim_value for size in sizes]


@torch.no_grad()
@pytest.mark.parametrize("call", CASES)
@pytest.mark.parametrize("training", [False, True])
def test_the_bound_is_taken_and_said(call, training, caplog):
    said, taken, refused = CASES[call]
    model = Calls(call).train(training)
    with caplog.at_level(logging.INFO, "torch2ort"):
        exported = torch2ort.export(model, X, dynamic_shapes={"x": {0: "n"}})
    assert first_sizes(exported) == ["n", 4, 6]
    for x in (X, torch.randn(taken, 4, 6)):
        torch.testing.assert_close(exported(x), model(x))
    with pytest.raises(torch2ort.SchemaMismatchError):
        exported(torch.randn(refused, 4, 6))
    assert f"Calls takes sizes for which {said}" in caplog.messages


@torch.no_grad()
def test_a_bound_that_torch_fails_to_suggest_is_taken():
    model = Calls(without_three).eval()
    exported = torch2ort.export(model, X, dynamic_shapes={"x": {0: "n"}})
    torch.testing.assert_close(exported(X[:6]), model(X[:6]))


@torch.no_grad()
def test_an_export_out_of_the_cache_has_the_name_and_the_bound(tmp_path):
    model = Calls(columns).eval()
    for hit in (False, True):
        exported = torch2ort.export(model, X, dynamic_shapes={"x": {0: "n"}}, cache_dir=tmp_path)
        assert (exported.cache.hit, first_sizes(exported)) == (hit, ["n", 4, 6])
        with pytest.raises(torch2ort.SchemaMismatchError):
            exported(torch.randn(8, 4, 6))


FIXED = {
    "a number": (lambda h: h + torch.zeros(10, 1, 1), X, {0: "n"}, "to be a constant (10)"),
    "another name": (
        lambda h: h + h.transpose(0, 1),
        X[:4],
        {0: "n", 1: "m"},
        "m = size(0, 1) and n = size(0, 0) must always be equal",
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_name_of_a_size_that_does_not_vary_by_itself_is_refused(name):
    call, x, names, said = FIXED[name]
    with pytest.raises(torch2ort.ExportError, match="Constraints violated") as caught:
        torch2ort.export(Calls(call).eval(), x, dynamic_shapes={"x": names})
    assert said in str(caught.value)


def test_the_bounds_of_a_dim_are_the_users():
    with pytest.raises(torch2ort.ExportError, match="Constraints violated"):
        torch2ort.export(Calls(windows).eval(), X, dynamic_shapes={"x": {0: torch.export.Dim("n")}})
