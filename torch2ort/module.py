"""ORTModule: a module whose forward and backward run on ONNX Runtime."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from torch2ort._torch import modules as private
from torch2ort.capture.plain_tensors import is_compiled, refuse_untraceable
from torch2ort.errors import ExportError, OptionError
from torch2ort.exported_model import ExportedModel
from torch2ort.options import Options, with_arguments
from torch2ort.providers import CUDA
from torch2ort.support.lazy import Lazy
from torch2ort.support.legacy_env_vars import warn_of_former_names
from torch2ort.training.device_providers import refuse_untried
from torch2ort.training.ort_targets import refuse_providers
from torch2ort.variants.profile import Profile
from torch2ort.variants.runner import Runner

# Classes of torch, compared by name: importing one takes longer than importing torch2ort.
_AROUND_MODELS = ("DistributedDataParallel", "FullyShardedDataParallel")


class _AddedAttribute:
    """An attribute that ORTModule adds to a model's own; an attribute of the model takes precedence.

    Args:
        read: returns the value for a module.
    """

    def __init__(self, read: Callable[[ORTModule], Any]) -> None:
        self.fget = read
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # Not a data descriptor: entries of the module's own dictionary are found before it.
    def __get__(self, module: ORTModule | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        try:
            # A parameter, buffer or submodule, or an attribute that the model's `__getattr__` finds, as in
            # peft.
            return getattr(type(module)._torch2ort_runner.model, self._name)
        except AttributeError:
            return self.fget(module)


class _Forward:
    """The attribute ``forward``: the model's, on ONNX Runtime, unless another one was set on the wrapper.

    The model's dictionary is the wrapper's, and may contain a ``forward`` of the model, which is exported.
    A ``forward`` that is set on the wrapper is called by the wrapper and not stored in the dictionary.
    """

    def __get__(self, module: ORTModule | None, kind: Any = None) -> Any:
        function = kind._torch2ort_forward
        # torch._dynamo is slow to import, and compiles nothing before it is imported.
        runner = getattr(kind, "_torch2ort_runner", None)
        if runner is not None and "torch._dynamo" in sys.modules:
            function = runner.hidden_forward.get()
        if module is None:
            return function
        own = kind._torch2ort_state.get("forward")
        return types.MethodType(function, module) if own is None else own

    def __set__(self, module: ORTModule, value: Any) -> None:
        type(module)._torch2ort_state["forward"] = value

    def __delete__(self, module: ORTModule) -> None:
        if type(module)._torch2ort_state.pop("forward", None) is None:
            raise AttributeError("forward")


def _no_model(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
    """Raise an error: the placeholder of forward in classes that do not wrap a model yet."""
    raise TypeError(f"{type(self).__name__}.forward: wrap a model first, as in torch2ort.ORTModule(model)")


class ORTModule(private.NeverCompiled, torch.nn.Module):
    """A module that runs ``model``, forward and backward, on ONNX Runtime.

    The new module is identical to the model except for ``forward``: it shares the model's attributes,
    parameters, buffers, submodules, hooks and mode (the same objects), is an instance of its class, and its
    own class has the name and module of that class. The first argument of a subclass is the model.

    Args:
        model: the module to run. It can still be used by itself, in eager PyTorch.
        options: settings; see :class:`torch2ort.Options`.

    Raises:
        OptionError: ``options`` is not a :class:`torch2ort.Options`, or names a provider that no engine
            supports.
        ExportError: ``model`` cannot be wrapped; the message gives the reason.

    The first call exports. A later call exports again if one of these differs from all earlier calls: the
    structure, a dtype, rank or constant of its arguments, the mode of a module, the tensors that require
    gradients, or whether gradients are recorded.

    Calls raise:
        UnsupportedOperatorError: the engine cannot run an operator correctly; raised before any step has run.
        EngineError: ONNX Runtime failed. Exceptions of the user's own code are propagated unchanged.
    """

    # Attributes of the class that is made for each model; the prefix avoids names of the model's class.
    _torch2ort_runner: Runner
    _torch2ort_state: dict[str, Any]
    _torch2ort_forward: Callable[..., Any] = _no_model

    forward: Any = _Forward()

    def __new__(
        cls, model: torch.nn.Module, *args: Any, options: Options | None = None, **kwargs: Any
    ) -> Any:
        """Make a class that derives from both this one and the model's class, and return its instance."""
        _refuse(cls, model, args, kwargs)
        warn_of_former_names()
        options = with_arguments(options)
        refuse_untried(options)
        refuse_providers(options, CUDA)
        runner = Runner(model, options)
        forward = _forward_of(type(model), runner)
        runner.hidden_forward = Lazy(lambda: _hidden_from_dynamo(forward))
        namespace: dict[str, Any] = {
            "__doc__": type(model).__doc__,
            "__module__": type(model).__module__,
            **_constructor_of(type(model), cls),
            **_attributes_of(type(model), cls),
            "_torch2ort_runner": runner,
            "_torch2ort_state": {},
            "_torch2ort_forward": forward,
        }
        named = type(model) if cls is ORTModule else cls
        kind = types.new_class(
            named.__name__, (cls, type(model)), exec_body=lambda body: body.update(namespace)
        )
        kind.__qualname__ = named.__qualname__
        module: ORTModule = object.__new__(kind)
        # Both share one dictionary: an attribute that is set on one is set on the other.
        object.__setattr__(module, "__dict__", model.__dict__)
        return module

    def __init__(self, model: torch.nn.Module, *, options: Options | None = None) -> None:
        """Do nothing: ``__new__`` initializes the module, and the shared attributes do not change."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the ``__init_subclass__`` of a model's class: the wrapper's class is not another model."""

    @_AddedAttribute
    def module(self) -> torch.nn.Module:
        """The model itself, which runs in eager PyTorch."""
        return type(self)._torch2ort_runner.model

    @_AddedAttribute
    def exported(self) -> ExportedModel | None:
        """The exported model that ran in the last forward; ``None`` before the first."""
        return type(self)._torch2ort_runner.exported

    @_AddedAttribute
    def startup(self) -> dict[str, float]:
        """The duration of the start so far, in seconds by phase; empty before the first call.

        The phases are ``"cache look-up"``, ``"imports"``, ``"trace"``, ``"translate"``, ``"shapes"``,
        ``"differentiate"``, ``"session"`` and ``"first run"``. They add up to the total duration.
        """
        return dict(type(self)._torch2ort_runner.startup.seconds)

    @_AddedAttribute
    def density(self) -> dict[str, Any]:
        """The rows of a batch that the last training step needed, and those that it left out.

        A row is one token of one sequence. ``"labels"`` is the share of labels that losses do not ignore,
        ``None`` for a model without such a loss; ``"tokens"`` is the share of rows that results depend on;
        both are ``None`` before the first step, and where no work depends on rows. ``"plan"`` is ``"dense"``
        for a step that computes all rows, or a list of those that it leaves out: ``"padding"``, ``"labels"``,
        ``"slices"`` or two of them, as ``"padding, labels"``. See :attr:`torch2ort.Options.sparsity`.
        """
        return type(self)._torch2ort_runner.density

    @_AddedAttribute
    def profile(self) -> Callable[[int], Profile]:
        """``module.profile(steps)`` profiles the next calls and their backwards, in a :class:`Profile`.

        Call its :meth:`Profile.table`, :meth:`Profile.to_json` or :meth:`Profile.chrome_trace` once the steps
        have run. These steps run in separate sessions; making the sessions takes time, and profiling takes
        some microseconds per node. A second profile ends the first.
        """
        return type(self)._torch2ort_runner.watch

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle only the model and the options; the graphs are built again."""
        runner = type(self)._torch2ort_runner
        return _rebuild, (type(self).__bases__[0], runner.model, runner.options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See :meth:`__reduce__`."""
        return self.__reduce__()


def density(module: ORTModule) -> dict[str, Any]:
    """Return :attr:`ORTModule.density` of a module whose model may have an attribute of that name.

    Args:
        module: The module.

    Raises:
        OptionError: ``module`` is no :class:`ORTModule`.
    """
    return _runner_of(module, "density").density


def profile(module: ORTModule, steps: int) -> Profile:
    """Profile the next steps as :attr:`ORTModule.profile` does, for a model that has such an attribute, too.

    Args:
        module: The module.
        steps: Number of calls to profile.

    Raises:
        OptionError: ``module`` is no :class:`ORTModule`, or ``steps`` is no positive integer.
    """
    return _runner_of(module, "profile").watch(steps)


def startup(module: ORTModule) -> dict[str, float]:
    """Return :attr:`ORTModule.startup` of a module whose model may have an attribute of that name.

    Args:
        module: The module.

    Raises:
        OptionError: ``module`` is no :class:`ORTModule`.
    """
    return dict(_runner_of(module, "startup").startup.seconds)


def _runner_of(module: object, function: str) -> Runner:
    if not isinstance(module, ORTModule):
        raise OptionError(
            f"torch2ort.{function} was called with a {type(module).__name__}; allowed is an ORTModule."
        )
    return type(module)._torch2ort_runner


def _rebuild(kind: type[ORTModule], model: torch.nn.Module, options: Options) -> Any:
    # __init__ is not called: the attributes that a subclass sets there are in the model's dictionary.
    return kind.__new__(kind, model, options=options)


def _constructor_of(kind: type[torch.nn.Module], wrapper: type[ORTModule]) -> dict[str, Any]:
    """Return ``__new__`` and ``__init__`` of the class that wraps a model of class ``kind``.

    Code that makes another model of the same class (``type(model)(config)``) gets one. Code that inspects the
    arguments of the class, as Lightning's ``load_from_checkpoint`` does, gets those of the model's class.
    """

    @functools.wraps(kind.__init__)
    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    @functools.wraps(kind.__init__)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.__init__(self, *args, **kwargs)

    return {"__new__": make, "__init__": initialise}


def _attributes_of(kind: type[torch.nn.Module], wrapper: type[ORTModule]) -> dict[str, Any]:
    """Return attributes of a model's class that ORTModule also offers; properties keep their setters."""
    names = (name for name in dir(ORTModule) if isinstance(vars(ORTModule).get(name), _AddedAttribute))
    return {
        name: inspect.getattr_static(kind, name)
        for name in names
        if hasattr(kind, name) and inspect.getattr_static(wrapper, name) is vars(ORTModule)[name]
    }


def _forward_of(kind: type[torch.nn.Module], runner: Runner) -> Callable[..., Any]:
    """Return the function ``forward`` of the class that wraps a model of class ``kind``."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return runner.run(args, kwargs)

    # Without __wrapped__, code that removes wrappers, such as accelerate with autocast's, stops here: the
    # wrapped function is no other wrapper, but the model's own forward in eager PyTorch.
    vars(forward)["__signature__"] = inspect.signature(kind.forward)
    del vars(forward)["__wrapped__"]
    return forward


def _hidden_from_dynamo(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` for torch.compile, which cannot trace a run of ONNX Runtime."""
    hidden: Callable[..., Any] = torch.compiler.disable(forward, reason="ORTModule runs on ONNX Runtime")
    del vars(hidden)["__wrapped__"]
    return hidden


def _refuse(cls: type, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an object that is not a model, or a model that cannot be wrapped."""
    if isinstance(model, ORTModule):
        raise ExportError("ORTModule: the model is already an ORTModule; wrap the original model once")
    if not isinstance(model, torch.nn.Module):
        below = "" if cls is ORTModule else ", the first argument of a subclass of ORTModule"
        raise ExportError(f"ORTModule: expected a torch.nn.Module{below}, got {type(model).__name__}")
    if cls is ORTModule and (args or kwargs):
        raise OptionError(
            f"ORTModule takes a model and the keyword argument options, and got {args or kwargs} besides; "
            f"write torch2ort.ORTModule(model, options=torch2ort.Options(...))"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(
            "ORTModule: the model is a torch.jit.ScriptModule, whose code cannot be exported; wrap the model "
            "that it was made of"
        )
    if is_compiled(model):
        raise ExportError(
            "ORTModule: the model is a result of torch.compile; wrap the model that was passed to "
            "torch.compile instead"
        )
    for kind in type(model).__mro__:
        if kind.__name__ in _AROUND_MODELS and kind.__module__.startswith("torch."):
            raise ExportError(
                f"ORTModule: the model is a {kind.__name__}, which exchanges gradients between processes "
                f"around a model's forward and backward; write {kind.__name__}(torch2ort.ORTModule(model))"
            )
    if _has_no_forward(model):
        raise ExportError(
            f"ORTModule: {type(model).__name__} defines no forward, and ORTModule runs forward on ONNX "
            f"Runtime; define it, or wrap the submodule whose forward is called"
        )
    refuse_untraceable(model)


def _has_no_forward(model: torch.nn.Module) -> bool:
    """Return True if ``model`` has no forward but one that raises, as Lightning's base class has."""
    forward = type(model).forward
    # A torch.fx.GraphModule's forward has no __module__.
    package = (getattr(forward, "__module__", None) or "").split(".")[0]
    undefined = forward is torch.nn.Module.forward or (
        package in ("lightning", "pytorch_lightning") and forward.__qualname__ == "LightningModule.forward"
    )
    return undefined and "forward" not in vars(model)
