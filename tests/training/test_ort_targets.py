"""Options and runtimes with which an ORTModule refuses to train."""

from __future__ import annotations

import re
from typing import Any

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


@pytest.mark.parametrize(
    ("measures", "named"), [({"autotune": True}, "'autotune' is True"), ({"mode": "max"}, "'mode' is 'max'")]
)
def test_measurements_without_a_cache_are_refused_in_deterministic_steps(measures: Any, named: str) -> None:
    options = Options(**measures, deterministic=True, cache_dir=False)
    with pytest.raises(OptionError) as error:
        torch2ort.ORTModule(torch.nn.Linear(2, 2), options=options)(torch.ones(2))
    assert str(error.value) == (
        f"Option {named}, 'deterministic' is True and 'cache_dir' is False; another process may measure and "
        f"decide differently. Leave out cache_dir=False, as the cache stores decisions, or one of the "
        f"others, or set autotune=False."
    )
