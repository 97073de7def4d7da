"""The wrapper's class looks like the model's, and its calls run on ONNX Runtime."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import torch2ort
from tests.support.functions import Square

X = torch.arange(12.0).reshape(3, 4) / 7


class Model(torch.nn.Module):
    """A scaled square."""

    registered: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        Model.registered += (cls.__name__,)

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 4)

    def forward(self, x, scale: float = 1.0):
        """Scale a square."""
        return Square.apply(self.layer(x)) * scale


def runs_on_onnx_runtime(output: torch.Tensor) -> bool:
    return type(output.grad_fn).__name__ == "BoundaryBackward"


def test_the_class_looks_like_the_models():
    before = Model.registered
    module = torch2ort.ORTModule(Model())
    kind = type(module)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Model", "Model", __name__)
    assert kind.__doc__ == "A scaled square."
    assert inspect.signature(kind.forward) == inspect.signature(Model.forward)
    assert kind.forward.__doc__ == "Scale a square."
    assert isinstance(module, torch2ort.ORTModule)
    assert isinstance(module, Model)
    assert Model.registered == before


def test_forward_of_the_class_runs_on_onnx_runtime():
    module = torch2ort.ORTModule(Model())
    assert runs_on_onnx_runtime(type(module).forward(module, X))
    assert runs_on_onnx_runtime(module.forward(X, scale=1.0))


def test_the_class_makes_models():
    made = type(torch2ort.ORTModule(Model()))(3)
    assert type(made) is Model
    assert made.layer.in_features == 3


def test_module_is_the_model():
    model = Model()
    assert torch2ort.ORTModule(model).module is model


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("whose", ["the model's", "the wrapper's"])
def test_compile_does_not_take_the_model_off_onnx_runtime(whose, first):
    model = Model()
    if first:
        model.compile(backend="eager")
    module = torch2ort.ORTModule(model)
    (model if whose == "the model's" else module).compile(backend="eager")
    assert runs_on_onnx_runtime(module(X))


def test_a_forward_that_is_set_on_the_wrapper_is_called_until_it_is_deleted():
    model = Model()
    module = torch2ort.ORTModule(model)
    on_onnx_runtime = module.forward
    module.forward = lambda x: on_onnx_runtime(x) * 2
    torch.testing.assert_close(module(X), model(X) * 2)
    del module.forward
    torch.testing.assert_close(module(X), model(X))
    with pytest.raises(AttributeError):
        del module.forward


def test_a_forward_that_is_set_on_the_model_is_exported():
    model = Model()
    module = torch2ort.ORTModule(model)
    module(X)
    plain = model.forward
    model.forward = lambda x, times=3: plain(x) * times
    torch.testing.assert_close(module(X, times=2), model(X, times=2))
    assert runs_on_onnx_runtime(module(X))


class Owner(Model):
    """Has attributes with the names of the wrapper's own."""

    startup = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.exported = [1]
        self.module = torch.nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(self.module(x))


def test_attributes_of_the_models_own_are_not_hidden():
    model = Owner()
    module = torch2ort.ORTModule(model)
    assert runs_on_onnx_runtime(module(X))
    assert module.exported is model.exported
    assert module.module is model._modules["module"]
    assert module.startup == "mine"
    assert isinstance(torch2ort.ORTModule.exported.fget(module), torch2ort.ExportedModel)


class Switched(Model):
    """Has a property with a setter, with the name of one of the wrapper's."""

    @property
    def startup(self):
        return f"the {self.kind}"

    @startup.setter
    def startup(self, value):
        self.kind = value


def test_a_property_of_the_models_own_is_read_and_set_as_it_says():
    module = torch2ort.ORTModule(Switched())
    module.startup = "diesel"
    assert module.startup == module.module.startup == "the diesel"
    assert type(module).startup is Switched.startup


class Delegating(Model):
    """Delegates missing attributes to the model that it holds, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Owner()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.held, name)


def test_what_the_models_getattr_finds_is_not_hidden():
    model = Delegating()
    assert torch2ort.ORTModule(model).exported is model.held.exported


def test_the_class_shows_the_models_arguments():
    kind = type(torch2ort.ORTModule(Model()))
    assert inspect.signature(kind.__init__) == inspect.signature(Model.__init__)
    assert inspect.signature(kind) == inspect.signature(Model)


@pytest.mark.parametrize("make", [torch.nn.ModuleList, torch.nn.Module])
def test_a_model_without_forward_is_refused(make):
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(make())
    assert str(caught.value) == (
        f"ORTModule: {make.__name__} defines no forward, and ORTModule runs forward on ONNX Runtime; "
        f"define it, or wrap the submodule whose forward is called"
    )


class Doubling(torch2ort.ORTModule):
    def __init__(self, model, name: str = "") -> None:
        super().__init__(model)
        self.name = name

    def forward(self, x):
        return super().forward(x) * 2


def test_a_class_below_ort_module_works():
    model = Model()
    module = Doubling(model, name="mine")
    assert isinstance(module, Doubling)
    assert module.name == "mine"
    torch.testing.assert_close(module(X), model(X) * 2)
    assert [f for f, _ in module(X).grad_fn.next_functions if type(f).__name__ == "BoundaryBackward"]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(copied, Doubling)
        assert copied.name == "mine"
        torch.testing.assert_close(copied(X), model(X) * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: Doubling("model"),
            "ORTModule: expected a torch.nn.Module, the first argument of a subclass of ORTModule, got str",
            id="a class below, without a model",
        ),
        pytest.param(
            lambda: torch2ort.ORTModule(torch.compile(Model())),
            "ORTModule: the model is a result of torch.compile; wrap the model that was passed to "
            "torch.compile instead",
            id="compiled",
        ),
        pytest.param(
            lambda: torch2ort.ORTModule(torch.jit.script(torch.nn.Linear(2, 2))),
            "ORTModule: the model is a torch.jit.ScriptModule, whose code cannot be exported; wrap the model "
            "that it was made of",
            id="scripted",
        ),
        pytest.param(
            lambda: torch2ort.ORTModule(torch.nn.Sequential(torch.nn.LazyLinear(3))),
            "Sequential: '0.weight' is not initialised, as a lazy module makes it in its first call. Call "
            "the model once in eager PyTorch, model(*inputs), then export or wrap it",
            id="lazy",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make, message):
    with pytest.raises(torch2ort.ExportError) as caught:
        make()
    assert str(caught.value) == message


def test_options_are_a_keyword_argument():
    with pytest.raises(
        torch2ort.OptionError, match=r"^ORTModule takes a model and the keyword argument options"
    ):
        torch2ort.ORTModule(Model(), torch2ort.Options())


def test_torch_compile_runs_the_wrapper_as_it_is():
    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch2ort.ORTModule(Model())

        def forward(self, x):
            return self.inner(x + 1) * 2

    parent = Parent()
    torch.testing.assert_close(torch.compile(parent, backend="eager")(X), parent(X))
    assert runs_on_onnx_runtime(torch.compile(parent.inner, backend="eager")(X))
