"""Options and runtimes with which an ORTModule refuses to train."""

from __future__ import annotations

import re

import onnxruntime
import pytest
import torch

import torch2ort
from torch2ort import Options
from torch2ort.errors import OptionError, RuntimeNotFoundError


def test_an_onnxruntime_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.18.1")
    message = (
        "training needs onnxruntime 1.20 or later, or onnxruntime-training 1.19.2, and this is 1.18.1; "
        "install one (pip install 'torch2ort[cpu]', in an environment without another onnxruntime)"
    )
    with pytest.raises(RuntimeNotFoundError, match=f"^{re.escape(message)}$"):
        torch2ort.ORTModule(torch.nn.Linear(2, 2))(torch.ones(2))


def test_decisions_that_no_other_process_knows_are_refused_where_all_are_to_be_alike() -> None:
    options = Options(autotune=True, deterministic=True, cache_dir=False)
    with pytest.raises(OptionError) as error:
        torch2ort.ORTModule(torch.nn.Linear(2, 2), options=options)(torch.ones(2))
    assert str(error.value) == (
        "Options 'autotune' and 'deterministic' are True and 'cache_dir' is False; what one process "
        "measures, another may decide otherwise. Leave out cache_dir=False, as the cache keeps "
        "decisions, or one of the two."
    )
