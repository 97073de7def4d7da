"""Options.providers: accepted forms, the sessions that get them, and refusals by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import torch2ort
from torch2ort import OptionError, Options
from torch2ort.errors import EngineError
from torch2ort.runtime.optimized_model import identity

CPU = "CPUExecutionProvider"
HERE = f"onnxruntime {onnxruntime.__version__} has {', '.join(onnxruntime.get_available_providers())} here"
ALLOWED = "a list of names of execution providers or of (name, options) pairs, or None for the CPU"
GIVEN = [(CPU, {"some_option": 1})]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The providers of each session that is made from here on."""
    found: list[Any] = []
    construct = onnxruntime.InferenceSession.__init__

    def noted(self: Any, model: Any, *args: Any, providers: Any = None, **kwargs: Any) -> None:
        # Sessions that probe onnxruntime for kernels are left out.
        if onnx.load_from_string(model).graph.name != "probe":
            found.append(providers)
        construct(self, model, *args, providers=providers, **kwargs)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", noted)
    return found


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that claims to have CUDA, and one more for GPUs."""
    names = ["CUDAExecutionProvider", "DmlExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ([CPU], (CPU,)),
        ((CPU,), (CPU,)),
        ([(CPU, {})], ((CPU, ()),)),
        ([(CPU, {"a": "b", "c": 3})], ((CPU, (("a", "b"), ("c", "3"))),)),
        ([[CPU, {"a": True}]], ((CPU, (("a", "True"),)),)),
    ],
)
def test_providers_are_stored_as_a_tuple_that_can_be_hashed(given: Any, stored: Any) -> None:
    options = Options(providers=given)
    assert options.providers == stored
    assert hash(options) == hash(Options(providers=stored))


def test_options_with_providers_are_replaced_copied_and_pickled() -> None:
    options = Options(providers=GIVEN)
    assert dataclasses.replace(options, opset=20).providers == options.providers
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("", None),
        (CPU, (CPU,)),
        (f' ["{CPU}"]', (CPU,)),
        (f'[["{CPU}", {{"a": "b"}}]]', ((CPU, (("a", "b"),)),)),
    ],
)
def test_the_environment_has_names_or_json(monkeypatch: pytest.MonkeyPatch, text: str, stored: Any) -> None:
    monkeypatch.setenv("TORCH2ORT_PROVIDERS", text)
    assert Options(providers=GIVEN).providers == stored


@pytest.mark.parametrize(
    "given",
    [
        CPU,
        [],
        3,
        [3],
        [""],
        [(CPU,)],
        [(CPU, 3)],
        [(CPU, [1])],
        [(CPU, {1: "a"})],
        [(CPU, {"a": None})],
        {CPU: {}},
    ],
)
def test_what_is_written_otherwise_is_named(given: Any) -> None:
    message = f"Option 'providers' is {given!r}; allowed is {ALLOWED}."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options(providers=given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["TPU"], f"names 'TPU', which is not an execution provider; {HERE}."),
        ([CPU, (CPU, {})], f"names {CPU!r} twice; name it once."),
        (
            ["CUDAExecutionProvider", CPU],
            f"names 'CUDAExecutionProvider', which is not available: {HERE}; the package onnxruntime-gpu "
            f"contains it, in an environment without another onnxruntime.",
        ),
        (
            [("RknpuExecutionProvider", {"a": "b"})],
            f"names 'RknpuExecutionProvider', which is not available: {HERE}; "
            f"https://onnxruntime.ai/docs/execution-providers says which build of onnxruntime contains it.",
        ),
    ],
)
def test_what_is_not_here_is_named_with_what_brings_it(given: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(f'Option {chr(39)}providers{chr(39)} {reason}')}$"):
        Options(providers=given)


def test_a_variable_that_names_a_provider_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH2ORT_PROVIDERS", "TPU")
    message = (
        f"Option 'providers' (from the environment variable TORCH2ORT_PROVIDERS) names 'TPU', which is "
        f"not an execution provider; {HERE}."
    )
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options()


def trained(model: torch.nn.Module, options: Options) -> torch.Tensor:
    module = torch2ort.ORTModule(model, options=options)
    result = module(torch.ones(4, 3))
    result.sum().backward()
    return result


def inferred(model: torch.nn.Module, options: Options) -> torch.Tensor:
    with torch.no_grad():
        return torch2ort.ORTModule(model, options=options)(torch.ones(4, 3))


def called(model: torch.nn.Module, options: Options) -> torch.Tensor:
    return torch2ort.export(model, torch.ones(4, 3), options=options)(torch.ones(4, 3))


def run(model: torch.nn.Module, options: Options) -> torch.Tensor:
    session = torch2ort.export(model, torch.ones(4, 3), options=options).session()
    name = session.get_inputs()[0].name
    return torch.from_numpy(session.run(None, {name: torch.ones(4, 3).numpy()})[0])


def compiled(model: torch.nn.Module, options: Options) -> torch.Tensor:
    torch.compiler.reset()
    made = torch.compile(model, backend="torch2ort", options={"providers": options.providers})
    result: torch.Tensor = made(torch.ones(4, 3))
    result.sum().backward()
    return result


@pytest.mark.parametrize("way", [trained, inferred, called, run, compiled])
def test_each_session_gets_the_providers_with_their_options(
    way: Callable[[torch.nn.Module, Options], torch.Tensor], made: list[Any]
) -> None:
    model = Model()
    result = way(model, Options(providers=GIVEN))
    torch.testing.assert_close(result.detach(), model(torch.ones(4, 3)).detach())
    assert made
    assert made == [[(CPU, {"some_option": "1"})]] * len(made)


@pytest.mark.parametrize("way", [trained, inferred])
def test_what_the_cache_keeps_is_made_with_them(
    way: Callable[[torch.nn.Module, Options], torch.Tensor], made: list[Any], tmp_path: Any
) -> None:
    for _ in range(2):
        way(Model(), Options(providers=GIVEN, cache_dir=tmp_path))
    assert len(made) > 2
    assert made == [[(CPU, {"some_option": "1"})]] * len(made)


def test_what_is_kept_of_a_session_depends_on_its_providers() -> None:
    assert identity(Options()) == identity(Options(providers=[CPU]))
    assert identity(Options()) != identity(Options(providers=GIVEN))


BEYOND = (
    "Option 'providers' names 'CUDAExecutionProvider'; ORTModule and torch.compile run on "
    "CPUExecutionProvider and AzureExecutionProvider alone so far, as the values that go from forward to "
    "backward, and to Functions, are in the CPU's memory. A model of torch2ort.export runs on any provider"
)


@pytest.mark.usefixtures("with_cuda")
def test_a_provider_that_no_engine_runs_on_is_refused_when_the_module_is_made() -> None:
    # CUDA has a message of its own: tests/training/test_device_providers.py.
    message = BEYOND.replace("CUDA", "Dml")
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        torch2ort.ORTModule(Model(), options=Options(providers=["DmlExecutionProvider"]))


@pytest.mark.usefixtures("with_cuda")
def test_torch_compile_refuses_it_too() -> None:
    torch.compiler.reset()
    made = torch.compile(Model(), backend="torch2ort", options={"providers": ["CUDAExecutionProvider"]})
    with pytest.raises(BackendCompilerFailed) as raised:
        made(torch.ones(4, 3))
    assert str(raised.value.inner_exception) == BEYOND


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize("way", [called, run])
def test_a_session_that_went_without_a_provider_is_refused(way: Any) -> None:
    cpu = ", ".join(onnxruntime.InferenceSession(IDENTITY, providers=[CPU]).get_providers())
    message = (
        f"Option 'providers' names 'CUDAExecutionProvider', which onnxruntime {onnxruntime.__version__} "
        f"could not start; its own message on stderr says why. Leave it out to run on {cpu}"
    )
    with pytest.raises(EngineError, match=f"^{re.escape(message)}$"):
        way(Model(), Options(providers=["CUDAExecutionProvider", CPU]))


IDENTITY = torch2ort.export(torch.nn.Identity(), torch.ones(1)).proto.SerializeToString()
