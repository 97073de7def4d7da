"""Outputs that depend on no input stand beside those that are trained."""

from __future__ import annotations

import pytest
import torch

import torch2ort

pytestmark = pytest.mark.ort_training("it is what is tried")


def _model(*constants):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("ones", torch.ones(3))

        def forward(self, x):
            return [self.layer(x).sum(), *(constant(self, x) for constant in constants)]

    return Model()


CONSTANTS = {
    "zeros": lambda model, x: torch.zeros(1),
    "a number": lambda model, x: torch.tensor(2.5),
    "a sum": lambda model, x: torch.zeros(()) + 1,
    "integers": lambda model, x: torch.arange(3),
    "bools": lambda model, x: torch.ones(2).bool(),
    "nothing": lambda model, x: torch.zeros(0, 2),
    "of a size": lambda model, x: x.new_full((x.shape[0],), 3.0),
    "of a buffer": lambda model, x: model.ones * 2,
}


@pytest.mark.parametrize("names", [*([name] for name in CONSTANTS), list(CONSTANTS)], ids=[*CONSTANTS, "all"])
def test_a_constant_is_returned_beside_a_loss(names):
    model = _model(*(CONSTANTS[name] for name in names))
    wrapped, x = torch2ort.ORTModule(model), torch.ones(2, 4)
    for _ in range(2):
        loss, *others = wrapped(x)
        loss.backward()
        for other, expected in zip(others, model(x)[1:], strict=True):
            torch.testing.assert_close(other, expected, rtol=0, atol=0)
            assert not other.requires_grad


def test_a_constant_of_double_precision_is_refused():
    model = torch2ort.ORTModule(_model(lambda model, x: torch.ones(2, dtype=torch.float64)))
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        model(torch.ones(2, 4))
    assert str(caught.value) == (
        "the model returns a constant in double precision, which onnxruntime-training cannot give beside "
        "what is trained. Return it in float32"
    )


def test_a_model_may_return_constants_only():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.ones(2)

    torch.testing.assert_close(torch2ort.ORTModule(Model())(torch.ones(2, 4)), torch.ones(2))
