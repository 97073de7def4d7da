"""An index that eager PyTorch refuses is refused with its error; every other has eager PyTorch's result."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops.indices import USES, Indexing, inputs, outcome
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.sweeps import sample_cases

MODES = ("training", "evaluation", "an export")


@pytest.fixture(scope="module")
def models():
    wrapped = torch2ort.ORTModule(Indexing())
    exported = torch2ort.export(Indexing().eval(), inputs())
    return {"training": wrapped.train, "evaluation": wrapped.eval, "an export": lambda: exported}


@pytest.mark.parametrize("mode", ["evaluation", "an export"])
def test_indices_inside_give_what_they_give_in_eager(models, mode):
    tensors, indices = inputs()
    actual = models[mode]()(tensors, indices)
    for name, use in USES.items():
        assert_same(actual[name], use.call(tensors[name], indices[name]), name)


def of_use(name, **others):
    """The arguments for one use alone."""
    tensors, indices = inputs(**others)
    return {name: tensors[name]}, {name: indices[name]}


def wrapped(name, training):
    """One use, built by a call: an index of another kind has another graph, seconds for a model of all."""
    model = torch2ort.ORTModule(Indexing({name: USES[name]})).train(training)
    model(*of_use(name))
    return model


# A model per use and mode, of which a quarter run.
@pytest.mark.parametrize(("name", "mode"), sample_cases(itertools.product(USES, MODES), 4))
def test_another_index_does_what_it_does_in_eager(models, name, mode):
    exported = mode == "an export"
    model = models[mode]() if exported else wrapped(name, mode == "training")
    for number in USES[name].others:
        tensors, indices = inputs(**{name: number})
        expected = outcome(USES[name].call, tensors[name], indices[name])
        given = (tensors, indices) if exported else of_use(name, **{name: number})
        actual = outcome(lambda *both: model(*both)[name], *given)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected)
        else:
            assert actual == expected


def test_indices_that_count_from_the_end_train_like_eager():
    counted = {n: -1 for n in ("brackets", "brackets, second axis", "index_put", "take", "assignment")}
    uses = {n: USES[n] for n in counted}
    tensors, indices = inputs(**counted)
    batch = {n: tensors[n].requires_grad_() for n in uses}, {n: indices[n] for n in uses}
    assert_trains_like_eager(Indexing(uses), [batch], steps=2)


def test_every_use_trains_like_eager():
    tensors, indices = inputs()
    batch = {n: t.requires_grad_() for n, t in tensors.items()}, indices
    assert_trains_like_eager(Indexing(), [batch], steps=1)


class Proven(torch.nn.Module):
    """Indices that are in range whatever the tensors' values are."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        rows = x.shape[0]
        return (
            self.table[torch.arange(4)],
            self.table.index_select(1, torch.tensor([3, 0])),
            x.gather(1, x.argsort(-1)),
            x.gather(1, x.topk(2).indices),
            x[torch.arange(rows)],
            x[rows - 1 - torch.arange(rows)],
            x[torch.arange(rows).unsqueeze(1), x.argmax(-1, keepdim=True)],
            F.one_hot(x.argmax(-1), 4) * x,
            self.table[(x > 0).sum(-1).clamp(0, 4)],
            x.flip(0),
        )


@pytest.mark.parametrize("training", [False, True])
def test_indices_that_cannot_lie_outside_are_not_checked(training):
    rows = torch.export.Dim("rows", min=2)
    exported = torch2ort.export(Proven(), torch.randn(3, 4), dynamic_shapes=({0: rows},), training=training)
    assert not [node for node in exported.proto.graph.node if "CheckedIndex" in str(node)]
    assert "IndexCheck" not in str([site.func_name for site in exported.python_ops])


class Buffered(torch.nn.Module):
    """Indices in a buffer that may change before a later call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(4))
        self.table = torch.nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return x + self.table.index_select(0, self.positions)


@pytest.mark.parametrize("training", [False, True])
def test_the_indices_of_a_buffer_are_checked_anew(training):
    model = Buffered().train(training)
    wrapped, x = torch2ort.ORTModule(model), torch.ones(4, 4)
    wrapped(x)
    model.positions[1] = -2
    assert outcome(wrapped, x) == outcome(model, x)


class Unpool(torch.nn.Module):
    def forward(self, x, indices):
        return F.max_unpool1d(x, indices, 2)


def test_indices_below_a_size_that_varies_are_refused_where_no_tensor_has_that_size():
    length = torch.export.Dim("length", min=2)
    sample = torch.randn(2, 3), torch.tensor([[0, 3, 5], [1, 2, 4]])
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.export(Unpool(), sample, dynamic_shapes=({1: length}, {1: length}))
    line = Unpool.forward.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"aten.max_unpool2d.default at {__file__}:{line}, in forward: return F.max_unpool1d(x, indices, 2) "
        f"gets indices that must be below a size that varies. Export with that size fixed"
    )


def assigned(x, i):
    result = x * 2
    result[:, i] = 1.0
    return result


INT32 = {
    "brackets": lambda x, i: x[i],
    "brackets, second axis": lambda x, i: x[:, i],
    "brackets, beside one of int64": lambda x, i: x[i, i.long()],
    "assignment": assigned,
    "index_put": lambda x, i: x.index_put((i,), x[:2] * 3),
    "index_put, accumulate": lambda x, i: x.index_put((i,), x[:2], accumulate=True),
    "index_add": lambda x, i: x.index_add(0, i, x[:2], alpha=2),
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(0, i[None].expand(3, -1)),
    "embedding": lambda x, i: F.embedding(i, x),
}


class Uses(torch.nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self._use = use

    def forward(self, i):
        return self._use(self.weight * 2, i)


@pytest.mark.parametrize("use", INT32.values(), ids=INT32)
def test_an_index_of_int32_gives_what_it_gives_in_eager(use):
    indices = torch.tensor([0, 2], dtype=torch.int32)
    model = Uses(use)
    torch.testing.assert_close(torch2ort.export(model, indices)(indices), model(indices))
    assert_trains_like_eager(model, [(indices,)], steps=1)
