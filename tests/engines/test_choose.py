"""Which engine trains an ORTModule."""

from __future__ import annotations

import re

import onnxruntime
import pytest
import torch

import torch2ort
from torch2ort import Options
from torch2ort.errors import RuntimeNotFoundError
from torch2ort.runtime import has_training


def test_the_module_names_the_engine_in_use() -> None:
    expected = "ort_training" if has_training() else "joint"
    assert torch2ort.ORTModule(torch.nn.Linear(2, 2)).engine == expected


@pytest.mark.ort_training("it is asked for")
def test_an_engine_may_be_asked_for() -> None:
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(engine="ort_training"))
    module(torch.ones(2)).sum().backward()
    assert module.engine == "ort_training"


@pytest.mark.ort_training("the joint engine runs on any other onnxruntime")
def test_an_engine_that_is_not_there_is_refused() -> None:
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(engine="joint"))
    message = (
        f"engine='joint' needs onnxruntime 1.20 or later, and this is {onnxruntime.__version__}; install one "
        f"(pip install 'torch2ort[cpu]', in an environment without another onnxruntime), or use "
        f"engine='ort_training' with onnxruntime-training"
    )
    with pytest.raises(RuntimeNotFoundError, match=f"^{re.escape(message)}$"):
        module(torch.ones(2))
