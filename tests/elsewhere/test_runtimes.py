"""Files run in other runtimes with eager PyTorch's results."""

from __future__ import annotations

import pytest

from tests.elsewhere.runtimes import EVALUATOR_FAILS, MODELS, difference

# Tolerance relative to the largest number of a result.
BOUND = 1e-4
FIRST = ("transformer, with Functions", "examples/reversible_layers.py", "ResNet", "Llama", "LSTM")
CHOSEN = [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in MODELS]


@pytest.mark.parametrize("name", CHOSEN)
def test_openvino_computes_as_eager(name: str) -> None:
    pytest.importorskip("openvino", reason="OpenVINO has no wheel for this Python")
    assert difference(name, "OpenVINO") < BOUND


@pytest.mark.parametrize("name", CHOSEN)
def test_the_reference_evaluator_computes_as_eager(name: str) -> None:
    if name in EVALUATOR_FAILS:
        with pytest.raises(ValueError, match=r"cannot reshape array|index and self should be the same size"):
            difference(name, "onnx's evaluator")
    else:
        assert difference(name, "onnx's evaluator") < BOUND
