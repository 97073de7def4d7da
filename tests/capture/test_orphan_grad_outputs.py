"""A value computed from a view made under ``no_grad`` requires a gradient that reaches no input."""

from __future__ import annotations

import copy

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from tests.support.sweeps import sample_cases


class Model(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            view = x[:, :1].expand(-1, 4)
            hidden = self.layer(x).t()
        return self.body(self, x, view, hidden)


BODIES = {
    "computed of it": lambda m, x, v, h: v.square().sum(-1),
    "beside what a gradient reaches": lambda m, x, v, h: (v.sin(), m.layer(x)),
    "by a Function": lambda m, x, v, h: Square.apply(v),
    "with a parameter": lambda m, x, v, h: m.layer(v),
    "a view of what requires none": lambda m, x, v, h: (h, h.exp()),
    "a view of what is not returned": lambda m, x, v, h: unrecorded(m.layer(x).tanh()),
}


def unrecorded(tensor):
    with torch.no_grad():
        return tensor[1:]


def outputs_of(module, x):
    found = module(x)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("body", sample_cases(BODIES.values(), 2), ids=BODIES)
def test_it_requires_a_gradient_and_gives_none_on_as_in_eager(body, tmp_path):
    torch.manual_seed(0)
    eager = Model(body)
    options = torch2ort.Options(cache_dir=tmp_path)
    models = [eager, *(torch2ort.ORTModule(copy.deepcopy(eager), options=options) for _ in range(2))]
    seen = []
    for model in models:
        shown = []
        # The transposed input is itself a view, of a tensor that requires no gradient.
        for x in (torch.ones(3, 4), torch.ones(5, 4), torch.ones(4, 3).t(), torch.ones(4, 4)):
            x.requires_grad_()
            outputs = outputs_of(model, x)
            shown += [(t.requires_grad, t.is_leaf, t.detach()) for t in outputs]
            if any(t.requires_grad for t in outputs):
                sum(t.sum() for t in outputs).backward()
            shown += [x.grad, *(p.grad for p in model.parameters())]
            with torch.no_grad():
                shown += [(t.requires_grad, t.is_leaf, t) for t in outputs_of(model, x.detach())]
        seen.append(shown)
    for actual in seen[1:]:
        torch.testing.assert_close(actual, seen[0])
