"""Outputs that are views in eager PyTorch are views of the same tensors, to write to and to differentiate."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases


class Model(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))
        self._body = body

    def forward(self, x):
        return self._body(self, x)


def pair(body):
    torch.manual_seed(0)
    model = Model(body)
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def no_grad(m, x):
    with torch.no_grad():
        return m.layer(x), x.view(-1)


OF_AN_INPUT = {
    "view": lambda m, x: (m.layer(x), x.view(-1)),
    "slice": lambda m, x: (m.layer(x), x[1:, ::2]),
    "transposed": lambda m, x: (m.layer(x), x.t()),
    "select": lambda m, x: (m.layer(x), x[:, 1]),
    "several": lambda m, x: (m.layer(x), x.unsqueeze(0).expand(2, -1, -1)[1, :2]),
    "one of several": lambda m, x: (m.layer(x), x.unbind(0)[1], x.split([1, 3], 1)[1]),
    "sizes": lambda m, x: (m.layer(x), x.view(x.shape[0] * 2, -1)),
    "detached": lambda m, x: (m.layer(x), x.detach()),
    "reshaped": lambda m, x: (m.layer(x), x.reshape(2, -1) if x.shape[0] % 2 == 0 else x.reshape(-1)),
    "a copy": lambda m, x: (m.layer(x), x.t().reshape(-1)),
    "like itself": lambda m, x: (m.layer(x), x.view_as(x)),
    "like another": lambda m, x: (m.layer(x), x[:, :1].expand_as(x), x.t().reshape_as(x.t())),
}
OF_THE_MODEL = {
    "parameter": lambda m, x: (m.layer(x), m.layer.weight.t()),
    "buffer": lambda m, x: (m.layer(x), m.table[: x.shape[0]]),
}
OF_AN_OUTPUT = {
    "view": lambda m, x: (h := m.layer(x), h.view(-1)),
    "view first": lambda m, x: ((h := m.layer(x)).t(), h),
    "slice": lambda m, x: (h := torch.tanh(m.layer(x)), h[:, -1]),
    "two": lambda m, x: (h := m.layer(x), h[:, :2], h[:, 1:].t()),
    "view of a view": lambda m, x: (h := m.layer(x), v := h.view(-1), v[::3]),
    "of what is not returned": lambda m, x: ((h := m.layer(x)).view(-1), h.unsqueeze(0), h[:, 1]),
    "of one that is written to": lambda m, x: (h := m.layer(x) + 0, (v := h[:, 0]), h.mul_(2), v.add_(1))[:2],
    "in a Function's result": lambda m, x: (h := m.layer(x).exp(), h.t()),
}


def unrecorded(view):
    def body(m, x):
        hidden = m.layer(x)
        with torch.no_grad():
            return view(m, x, hidden)

    return body


def written_unrecorded(m, x):
    result = x.sin() if x.requires_grad else m.layer(x)
    with torch.no_grad():
        m.table.add_(1)
    return result, m.table[0]


UNDER_NO_GRAD = {
    "of an input": unrecorded(lambda m, x, h: (h, x[:, :1].expand(-1, 4))),
    "of a parameter": unrecorded(lambda m, x, h: (h, m.layer.weight.t())),
    "of an output": unrecorded(lambda m, x, h: (h, h[:, 1:].t())),
    "one of several": unrecorded(lambda m, x, h: (h, h.split([1, 3], 1)[1])),
    "of what was written there": written_unrecorded,
}
BODIES = {
    **{f"under no_grad, {n}": b for n, b in UNDER_NO_GRAD.items()},
    **{f"input, {n}": b for n, b in OF_AN_INPUT.items()},
    **{f"model, {n}": b for n, b in OF_THE_MODEL.items()},
    **{f"output, {n}": b for n, b in OF_AN_OUTPUT.items()},
}


def memory_of(tensors):
    """For each tensor, the first one that shares its memory, and its place there."""
    addresses = [t.untyped_storage().data_ptr() for t in tensors]
    return [
        (addresses.index(a), tuple(t.shape), t.stride(), t.storage_offset())
        for a, t in zip(addresses, tensors, strict=True)
    ]


def known(module, x, outputs):
    """The tensors that the caller holds, the outputs last."""
    return [x, module.layer.weight, module.table, *outputs]


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *sample_cases([(name, True) for name in BODIES], 3),
        *sample_cases([(name, False) for name in BODIES], 3),
    ],
)
def test_outputs_share_memory_as_in_eager_and_writes_show(name, gradients):
    seen = []
    for module in pair(BODIES[name]):
        shown = []
        for rows in (4, 3):
            x = torch.linspace(-1, 1, 4 * rows).reshape(rows, 4).requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                outputs = module(x)
            shown.append(memory_of(known(module, x, outputs)))
            shown.append([t.requires_grad for t in outputs])
            with torch.no_grad():
                for i, tensor in enumerate(outputs):
                    tensor[(0,) * tensor.dim()] = i + 5
            shown += [t.detach().clone() for t in known(module, x, outputs)]
        seen.append(shown)
    for actual, expected in zip(seen[1], seen[0], strict=True):
        if isinstance(expected, torch.Tensor):
            assert_same(actual, expected, "value")
        else:
            assert actual == expected


@pytest.mark.parametrize("name", sample_cases(BODIES, 3))
def test_gradients_flow_through_them(name):
    results = []
    for module in pair(BODIES[name]):
        x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        outputs = module(x)
        sum((i + 2) * t.square().sum() for i, t in enumerate(outputs)).backward()
        results.append([x.grad, module.layer.weight.grad, module.layer.bias.grad])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_same(actual, expected, "gradient")


def test_a_write_that_autograd_records_is_recorded():
    results = []
    for module in pair(OF_AN_OUTPUT["slice"]):
        hidden, last = module(torch.linspace(-1, 1, 16).reshape(4, 4))
        last.mul_(2)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            hidden.sum().backward()
        hidden, last = module(torch.linspace(-1, 1, 16).reshape(4, 4))
        (hidden + 0).sum().backward()
        results.append(module.layer.weight.grad)
    assert_same(results[1], results[0], "gradient")


def test_a_write_to_a_view_of_what_backward_reads_is_refused():
    for module in pair(lambda m, x: (h := m.layer(x), h[:, :2], torch.tanh(h[:, :2].exp()))):
        _, view, result = module(torch.ones(3, 4))
        with torch.no_grad():
            view.zero_()
        result.sum().backward()
    for module in pair(lambda m, x: (h := torch.exp(m.layer(x)), h[:, :2], h.sum())):
        _, view, result = module(torch.ones(3, 4))
        with torch.no_grad():
            view.zero_()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            result.backward()


def test_a_tensor_with_other_strides_gives_what_it_gives_in_eager():
    found = []
    for module in pair(lambda m, x: (m.layer(x), x.reshape(-1))):
        inputs = [torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(4, 8)[:, ::2]]
        for x in inputs:
            module(x)[1].zero_()
        found.append([x.sum().item() for x in inputs])
    assert found == [[0, 16, 0]] * 2


def test_a_cached_graph_gives_views(tmp_path):
    options = torch2ort.Options(cache_dir=tmp_path)
    for run in range(2):
        module = torch2ort.ORTModule(Model(OF_AN_OUTPUT["two"]), options=options)
        hidden, first, second = module(torch.ones(3, 4))
        with torch.no_grad():
            first.fill_(7)
        assert second[0].eq(7).all()
        assert hidden[:, :2].eq(7).all()
        assert module.exported.cache.hit == (run == 1), module.exported.cache.bypass_reason


AT_A_PLACE_IN_A_TENSOR = {
    "itself": lambda m, i: m.layer.weight[i],
    "viewed": lambda m, i: m.layer.weight[i].view(4),
    "computed": lambda m, i: m.layer.weight[i + 1].unsqueeze(0),
    "of a buffer": lambda m, i: m.table[i].view(2, 2),
    "beside parts of it": lambda m, i: ((row := m.layer.weight[i]), row.view(4, 1), row[:2]),
    "a slice": lambda m, i: m.layer.weight[: i.item()],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("body", AT_A_PLACE_IN_A_TENSOR.values(), ids=AT_A_PLACE_IN_A_TENSOR)
def test_a_part_at_a_place_in_a_tensor_has_eagers_values_and_gradients(body, mode):
    found = []
    for model in pair(lambda m, i: (m.layer(m.table), *(o if isinstance(o := body(m, i), tuple) else (o,)))):
        with mode():
            outputs = [model(torch.tensor(i)) for i in (1, 2)][1][mode is not torch.enable_grad :]
        for output in outputs:
            if output.requires_grad:
                output.square().sum().backward(retain_graph=True)
        values = [(o.requires_grad, o.is_leaf, o.detach()) for o in outputs]
        found.append((values, [p.grad for p in model.parameters()]))
    for (*flags, value), (*expected, other) in zip(found[1][0], found[0][0], strict=True):
        assert flags == expected
        assert_same(value, other, "output")
    for actual, expected in zip(found[1][1], found[0][1], strict=True):
        assert_same(actual, expected, "gradient")
