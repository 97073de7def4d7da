"""The arguments of a site, and its attributes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import make_site
from torch2ort.pythonop.native import native


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * factor * y, 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, nothing: None) -> tuple[None, None, None]:
        return None, None, None


ARGUMENTS = (torch.ones(2, requires_grad=True), 2.0, torch.ones(2))


def site(**overrides: Any) -> native.Site:
    return make_site(Two, *ARGUMENTS, **overrides)


def test_a_site_shows_its_names_and_counters() -> None:
    found = site(name="mylib.Two", key="two#1")
    assert (found.name, found.key, found.calls, found.copied_bytes) == ("mylib.Two", "two#1", 0, 0)
    assert repr(found) == "<Site two#1 of mylib.Two>"


@pytest.mark.parametrize("attribute", ["name", "key", "calls", "copied_bytes", "other"])
def test_a_site_cannot_be_changed(attribute: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        setattr(site(), attribute, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tensor_positions": (2, 0)}, "tensor_positions must be increasing positions of arguments"),
        ({"tensor_positions": (0, 3)}, "tensor_positions must be increasing positions of arguments"),
        ({"needs_input_grad": (True,)}, "needs_input_grad needs one entry an argument"),
        ({"input_dtypes": ("float32",)}, "input_dtypes needs one entry a tensor argument"),
        ({"tensor_outputs": (2,)}, "tensor_outputs must be increasing positions of outputs"),
        (
            {"output_ranks": (1, 1)},
            "output_dtypes and output_ranks need one entry a tensor output, mutated arguments that forward "
            "does not return included",
        ),
        ({"output_ranks": (-1,)}, "output_ranks must hold numbers from 0 to 64"),
        ({"output_ranks": (2**40,)}, "output_ranks must hold numbers from 0 to 64"),
        ({"returns_tuple": False}, "outputs needs exactly one entry when returns_tuple is False"),
        ({"non_differentiable": (1,)}, "non_differentiable must hold positions of tensor outputs"),
        ({"mutated": (1,)}, "mutated must hold positions of tensor arguments"),
        (
            {"forward_map": {0: 1}},
            "forward_map must map positions of tensor outputs to positions of tensor arguments",
        ),
        (
            {"backward_map": {0: 1}},
            "backward_map must map positions of tensor arguments to positions of tensor outputs",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Site: {message}$"):
        site(**overrides)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^unknown dtype 'float31': expected a name such as 'float32'$"):
        site(input_dtypes=("float31", "float32"))


def test_a_missing_setting_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Site\(\) missing required keyword-only argument: 'key'$"):
        native.Site(name="a")  # type: ignore[call-arg]


def test_a_site_in_a_cycle_is_collected() -> None:
    holder: list[Any] = []
    holder.append(site(arguments=(None, holder, None)))
    gone = weakref.ref(holder[0])
    del holder
    gc.collect()
    assert gone() is None


def test_begin_returns_the_run_before() -> None:
    first, second = native.Run(), native.Run()
    assert native.begin(first) is None
    assert native.begin(second) is first
    assert native.begin(None) is second


def test_begin_takes_runs_only() -> None:
    with pytest.raises(TypeError, match=r"^begin\(\) takes a Run or None, not int$"):
        native.begin(3)  # type: ignore[arg-type]
