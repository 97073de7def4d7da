"""Families of models train and run through torch.compile as in eager PyTorch, two sizes each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager, tensors_of

pytest.importorskip("transformers", reason="the libraries are installed beside one onnxruntime alone")

from tests.models.families import FAMILIES
from tests.models.test_families import call, loss_of

pytestmark = [
    pytest.mark.long,
    # Three graphs and more of one model, on a machine that is shared.
    pytest.mark.timeout(900),
]


# nn.LSTM and similar modules break dynamo's graph, and these models contain nothing else.
LEFT_TO_EAGER = {
    *("lstm", "lstm_proj", "lstm_proj_both", "lstm_packed", "seq2seq_lstm"),
    *("gru", "gru_deep", "rnn", "rnn_relu"),
}
REFUSED = {
    "fourier": "aten._fft_r2c.default at ",
    # These assert that no value is NaN.
    **dict.fromkeys(
        ("ibert", "ibert_quantised"),
        r"aten\._assert_async\.msg at .* returns nothing and raises an error for some values",
    ),
}
# The error of eager PyTorch's float32 gradients against float64 exceeds this test's bounds.
IN_FLOAT64 = {"detr"}
# With varying sizes it is refused by name.
OF_FIXED_SIZES = {"big_bird_sparse"}


def compiled(model: torch.nn.Module, *, dynamic: bool | None = None) -> torch.nn.Module:
    model.compile(backend="torch2ort", dynamic=dynamic)
    return model


def train_and_infer(module: torch.nn.Module, batches: Sequence[Any]) -> None:
    """A step with each batch, and a call without gradients."""
    for batch in batches:
        loss_of(call(module.train(), batch)).backward()
    with torch.no_grad():
        call(module.eval(), batches[0])


@pytest.fixture
def _numpy_draws() -> Iterator[None]:
    """Have dynamo use NumPy's random stream, from which BigBird draws its random blocks."""
    with torch._dynamo.config.patch(use_numpy_random_stream=True):
        yield


@pytest.mark.usefixtures("_numpy_draws", "checked_distributions")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    dynamic = False if name in OF_FIXED_SIZES else None
    monkeypatch.setattr(torch2ort, "ORTModule", partial(compiled, dynamic=dynamic))
    torch.manual_seed(0)
    model, batches = FAMILIES[name].make()
    if name in IN_FLOAT64:
        model, batches = model.double(), [{key: value.double() for key, value in b.items()} for b in batches]
    if name in REFUSED:
        module = compiled(model)
        refusals = (torch._dynamo.exc.BackendCompilerFailed, torch2ort.UnsupportedOperatorError)
        with pytest.raises(refusals, match=REFUSED[name]):
            train_and_infer(module, batches)
        return
    trained = assert_trains_like_eager(model.train(), batches, lr=0.0, steps=2, loss=loss_of)
    assert bool(torch2ort.compile_report().graphs) == (name not in LEFT_TO_EAGER)
    eager = copy.deepcopy(model).eval()
    with torch.no_grad():
        actual, expected = call(trained.eval(), batches[0]), call(eager, batches[0])
    for i, (a, e) in enumerate(zip(tensors_of(actual), tensors_of(expected), strict=True)):
        assert_same(a, e, f"inference, output {i}")
