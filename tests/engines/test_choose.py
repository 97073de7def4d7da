"""Which engine trains an ORTModule."""

from __future__ import annotations

import re

import onnxruntime
import pytest
import torch

import torch2ort
from torch2ort import Options
from torch2ort.engines import choose
from torch2ort.errors import OptionError, RuntimeNotFoundError
from torch2ort.runtime import has_training


@pytest.fixture(autouse=True)
def _asked_for_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH2ORT_ENGINE", raising=False)


def test_the_module_names_the_engine_in_use() -> None:
    expected = "ort_training" if has_training() else "joint"
    assert torch2ort.ORTModule(torch.nn.Linear(2, 2)).engine == expected


@pytest.mark.parametrize("name", ["joint", *(["ort_training"] if has_training() else [])])
def test_an_engine_may_be_asked_for(name: str) -> None:
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(engine=name))
    module(torch.ones(2)).sum().backward()
    assert module.engine == name


def test_an_onnxruntime_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_training", lambda: False)
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(engine="joint"))
    message = (
        "engine='joint' needs onnxruntime 1.20 or later, and this is 1.19.2; install one "
        "(pip install 'torch2ort[cpu]', in an environment without another onnxruntime), or use "
        "engine='ort_training' with onnxruntime-training"
    )
    with pytest.raises(RuntimeNotFoundError, match=f"^{re.escape(message)}$"):
        module(torch.ones(2))


@pytest.mark.parametrize("option", ["fuse", "autotune"])
def test_what_the_joint_engine_alone_does_chooses_it(option: str) -> None:
    module = torch2ort.ORTModule(torch.nn.Linear(2, 2), options=Options(**{option: True}))
    assert module.engine == "joint"


@pytest.mark.parametrize(("option", "does"), [("fuse", "fuses"), ("autotune", "measures")])
def test_an_engine_that_does_not_do_it_is_refused(option: str, does: str) -> None:
    options = Options(**{option: True}, engine="ort_training")
    with pytest.raises(OptionError) as error:
        torch2ort.ORTModule(torch.nn.Linear(2, 2), options=options)(torch.ones(2))
    assert str(error.value) == (
        f"Option {option!r} is True and 'engine' is 'ort_training'; only the joint engine {does}. "
        f"Leave engine out, or set it to 'joint'."
    )


def test_decisions_that_no_other_process_knows_are_refused_where_all_are_to_be_alike() -> None:
    options = Options(autotune=True, deterministic=True, engine="joint")
    with pytest.raises(OptionError) as error:
        torch2ort.ORTModule(torch.nn.Linear(2, 2), options=options)(torch.ones(2))
    assert str(error.value) == (
        "Options 'autotune' and 'deterministic' are True and 'cache_dir' is None; what one process "
        "measures, another may decide otherwise. Set cache_dir, where decisions are kept, or leave one "
        "of the two out."
    )
