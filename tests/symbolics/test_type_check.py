"""A graph with contradicting types is refused at export, by the name of the operator."""

import inspect
import re

import pytest
import torch

import torch2ort
from tests.support.callable_module import CallableModule

X = torch.randn(2, 4)


@torch.library.custom_op("torch2ort_tests::typed", mutates_args=())
def typed(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@typed.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.fixture
def translation():
    torch2ort.register_symbolic(
        "torch2ort_tests::typed", lambda g, x: g.op("ScatterND", x, g.op("Cast", x, to=6), x)
    )
    yield
    torch2ort.unregister("torch2ort_tests::typed")


@torch.no_grad()
@pytest.mark.usefixtures("translation")
def test_it_is_refused():
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.export(CallableModule(lambda model, h: typed(h).relu().exp()).eval(), X)
    source, first = inspect.getsourcelines(CallableModule.forward)
    line = re.escape(f"{inspect.getfile(CallableModule)}:{first + 1}, in forward: {source[1].strip()}")
    assert re.fullmatch(
        rf"torch2ort_tests\.typed\.default at {line} has no translation to ONNX for tensors of these types "
        rf"and shapes: its ScatterND does not fit \(.*tensor\(int64\), has unsupported type: "
        rf"tensor\(int32\).*\)\. Write it with others, register a translation with "
        rf"torch2ort\.register_symbolic, or put it into a torch\.autograd\.Function",
        str(caught.value),
    )
