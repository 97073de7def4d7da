"""Refusal of calls with arguments of torch.onnx.export; the error has the call to write instead."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch2ort.errors import ExportError, OptionError
from torch2ort.options import Options
from torch2ort.support.user_warnings import warn

_P = ParamSpec("_P")
_R = TypeVar("_R")

_STAGES = "options=torch2ort.Options(save_onnx_dir=...) writes the graph of each stage"

# Arguments of torch.onnx.export -> their replacement; without those from which the suggested call is made.
_INSTEAD: Mapping[str, str] = {
    "artifacts_dir": _STAGES,
    "autograd_inlining": "Functions are never inlined",
    "custom_opsets": "an exporter names the domain of the operators that it makes",
    "custom_translation_table": "operators are translated by torch2ort.register_symbolic",
    "do_constant_folding": "ONNX Runtime folds constants when it makes a session",
    "dump_exported_program": _STAGES,
    "dynamo": "torch.export is always used",
    "export_modules_as_functions": "a graph is flat",
    "export_params": "the weights are always part of the model",
    "external_data": "save() writes weights to a file beside the model if they exceed 2 GiB",
    "fallback": "there is no other exporter to fall back to",
    "keep_initializers_as_inputs": "the weights are initializers",
    "operator_export_type": "an operator without a translation is refused by name",
    "optimize": "ONNX Runtime optimizes the graph when it makes a session",
    "profile": "the time of an export is logged by options=torch2ort.Options(log_level='info')",
    "report": "the report of an export is logged by options=torch2ort.Options(log_level='devinfo')",
    "verbose": "the stages of an export are logged by options=torch2ort.Options(log_level='info')",
    "verify": "compare the result of the exported model, exported(...), with that of the model",
}
_OF_A_CALL = ("args", "f", "opset_version", "dynamic_axes", "input_names", "output_names")


def refuses_habits(export: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate :func:`torch2ort.export` to refuse a call of torch.onnx.export with the call to write instead.

    Calls raise:
        ExportError: the call has arguments of torch.onnx.export.
        OptionError: the call passes :class:`torch2ort.Options` by position.
    """

    @functools.wraps(export)
    def refusing(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        foreign = [name for name in kwargs if name in _INSTEAD or name in _OF_A_CALL]
        if foreign or len(args) > 2:
            _refuse(args, kwargs, foreign)
        try:
            return export(*args, **kwargs)
        except Exception as error:
            if type(args[1] if len(args) > 1 else kwargs.get("sample")) is list:
                _say_of_list(error)
            raise

    return refusing


def options_by_name(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function of a model and a sample to refuse further arguments by position.

    Calls raise:
        OptionError: the argument is :class:`torch2ort.Options`.
        ExportError: the argument is any other object.
    """

    @functools.wraps(function)
    def refusing(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > 2:
            _refuse_position(function.__name__, args[2])
        return function(*args, **kwargs)

    return refusing


def _refuse_position(name: str, given: Any) -> NoReturn:
    if isinstance(given, Options):
        raise OptionError(
            f"{name} takes its options by name; write torch2ort.{name}(model, sample, "
            f"options=torch2ort.Options(...))"
        )
    raise ExportError(
        f"{name} takes two arguments by position, a model and a sample, and got {given!r} after them; pass "
        f"that by its name"
    )


def _refuse(args: tuple[Any, ...], kwargs: Mapping[str, Any], foreign: Sequence[str]) -> NoReturn:
    path = kwargs.get("f")
    if len(args) > 2:
        path = args[2]
        if not isinstance(path, (str, os.PathLike)):
            _refuse_position("export", path)
    model = args[0] if args else kwargs.get("model")
    reasons = [f"{name} ({_INSTEAD[name]})" for name in foreign if name in _INSTEAD]
    taken = [name for name in foreign if name not in _INSTEAD]
    if len(args) > 2:
        taken.insert(0, "a path")
    what = f"export does not take {_listed(taken)} as torch.onnx.export does. " if taken else ""
    more = f"export has no {'; '.join(reasons)}. " if reasons else ""
    raise ExportError(f"{what}{more}Write {_call(model, path, kwargs)}")


def _call(model: Any, path: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the call of torch2ort that replaces a call of torch.onnx.export."""
    parameters = list(inspect.signature(model.forward).parameters) if hasattr(model, "forward") else []
    names = list(kwargs.get("input_names") or ())
    given = dict(zip(names, parameters, strict=False))
    arguments = ["model", "sample"]
    if kwargs.get("dynamic_axes"):
        outputs = set(kwargs.get("output_names") or ())
        known = {**{name: name for name in parameters}, **given}
        arguments.append(f"dynamic_shapes={dict(_shapes(kwargs['dynamic_axes'], known, outputs))}")
    if kwargs.get("opset_version") is not None:
        arguments.append(f"opset={kwargs['opset_version']}")
    own = ("kwargs", "dynamic_shapes", "training", "opset", "cache_dir", "options")
    arguments += [f"{name}=..." for name in own if kwargs.get(name) is not None]
    renamed = {old: new for new, old in given.items() if old != new}
    renamed.update(_outputs(list(kwargs.get("output_names") or ())))
    call = f"torch2ort.export({', '.join(arguments)})"
    if renamed:
        call += f".renamed({renamed})"
    if path is not None:
        call += f".save({os.fspath(path)!r})"
    return call


def _shapes(
    axes: Mapping[str, Any], parameters: Mapping[str, str], outputs: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield ``dynamic_axes`` as ``dynamic_shapes``; sizes of outputs follow from those of inputs."""
    for name, dimensions in axes.items():
        if name in outputs or (parameters and name not in parameters):
            continue
        if not isinstance(dimensions, Mapping):
            dimensions = {axis: f"{name}_{axis}" for axis in dimensions}
        yield parameters.get(name, name), dict(dimensions)


def _outputs(names: list[str]) -> dict[str, str]:
    """Return the new names of outputs: of the only one, or of those of a tuple."""
    if len(names) == 1:
        return {"output": names[0]} if names[0] != "output" else {}
    return {str(i): name for i, name in enumerate(names)}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _say_of_list(error: Exception) -> None:
    """Add a note to the error of a call whose sample is a list: a list is one argument."""
    said = (
        "The sample is a list, which is one argument of forward. If its entries are the arguments, pass a "
        "tuple: torch2ort.export(model, tuple(sample))"
    )
    if sys.version_info >= (3, 11):
        error.add_note(said)
    else:
        warn(said)
