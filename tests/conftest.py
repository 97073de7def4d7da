"""The state that every test starts from: one thread, a fixed seed, no settings from outside."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext

import hypothesis
import pytest
import torch

from tests.support import device
from torch2ort.runtime import stock

LONG = os.environ.get("TORCH2ORT_LONG", "0") not in ("", "0")

hypothesis.settings.register_profile("short", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("long" if LONG else "short")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``: the device of the tests' tensors."""
    parser.addoption(
        "--device",
        choices=["cpu", "cuda", "emulated"],
        default="cpu",
        help="where tensors are made by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Store the requested device where the collection of tests finds it."""
    device.asked = config.getoption("device")
    if device.asked == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a GPU, and PyTorch sees none")
    if device.asked == "cuda":
        stock.try_cuda()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that do not apply to this machine or this run, with the reason."""
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="takes long; run it with `make test-long`"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure() -> None:
    """Let the garbage collector collect everything at exit: some libraries look for leaks there."""
    gc.unfreeze()


@pytest.fixture
def checked_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have distributions check values: dynamo, once it has run in a process, turns these checks off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    """Exclude objects that the tests of other files hold from collection: a third of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed torch, use one thread, and hide the caller's TORCH2ORT_ settings."""
    for variable in [name for name in os.environ if name.startswith("TORCH2ORT_")]:
        monkeypatch.delenv(variable)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Not 0: once onnxruntime-training is imported, the first two dropout masks after seed 0 are equal.
    torch.manual_seed(1)
    if device.asked == "emulated":
        device.emulate(monkeypatch)
    # The emulated device is entered as a real one is, to show that tests can run on it.
    kind = "cuda" if device.asked == "cuda" else "cpu"
    with nullcontext() if device.asked == "cpu" else torch.device(kind):
        yield
    torch.set_num_threads(threads)
