"""A model together with its loss function, which a trainer's graph computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort import OptionError, SchemaMismatchError, io_schema
from torch2ort.trainer.model_desc import ModelDesc

_MODEL = "model."


class WholeModel(torch.nn.Module):
    """A module from the described inputs to the described outputs, both in order.

    Args:
        model: the model.
        loss_fn: computes the loss from the model's outputs and the last input; ``None`` where the model
            returns its loss itself.
        names: names of the inputs of `model`, which its ``forward`` takes by these names.
        outputs: the number of described outputs, including the loss.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Callable[..., Any] | None, names: Sequence[str], outputs: int
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.names = tuple(names)
        self.outputs = outputs

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return as many outputs as are described, the loss first if there is a loss function."""
        named = dict(zip(self.names, inputs, strict=False))
        result = self.model(**named)
        found, _ = io_schema.flatten(result)
        if self.loss_fn is not None:
            found = [self.loss_fn(result, inputs[-1]), *found]
        if len(found) < self.outputs:
            raise SchemaMismatchError(
                f"model_desc describes {self.outputs} outputs and the model returns {len(found)}"
                f"{', its loss among them' if self.loss_fn is not None else ''}; describe those that "
                f"there are."
            )
        return tuple(found[: self.outputs])

    def public_name(self, name: str) -> str:
        """Return the user's name of the parameter or buffer `name` of this module."""
        return name.removeprefix(_MODEL)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers, without copies, by the user's names."""
        return {self.public_name(name): value for name, value in self.state_dict(keep_vars=True).items()}


def whole_model(
    model: torch.nn.Module, loss_fn: Callable[..., Any] | None, description: ModelDesc
) -> WholeModel:
    """Join a model and its loss function.

    Args:
        model: the model.
        loss_fn: takes the model's outputs and the last described input; or ``None``.
        description: the inputs of both, and the outputs of both.

    Raises:
        OptionError: the description does not match the two.
    """
    loss = description.loss_position()
    names = [one.name for one in description.inputs]
    if loss_fn is not None:
        _check_loss_function(loss_fn)
        if len(names) < 2:
            raise OptionError(
                f"model_desc describes the input {names[0]!r} alone; with a loss_fn, its label is the "
                f"last input."
            )
        if loss != 0:
            raise OptionError(
                f"model_desc says that output {loss}, {description.outputs[loss].name!r}, is the loss; "
                f"with a "
                f"loss_fn, the loss is the first output."
            )
        names = names[:-1]
    _check_names(model, names)
    if loss_fn is not None and hasattr(model, "loss_fn") and isinstance(loss_fn, torch.nn.Module):
        _refuse_two_owners(model, loss_fn)
    return WholeModel(model, loss_fn, names, len(description.outputs))


def _check_loss_function(loss_fn: Callable[..., Any]) -> None:
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return  # a function written in C has no signature
    needed = [one for one in parameters if one.default is one.empty and one.kind in _POSITIONAL]
    taken = [one for one in parameters if one.kind in _POSITIONAL]
    if len(needed) > 2 or (len(taken) < 2 and not any(one.kind is one.VAR_POSITIONAL for one in parameters)):
        raise OptionError(
            f"loss_fn takes ({', '.join(one.name for one in parameters)}); allowed is a function of two "
            f"arguments, "
            f"what the model returns and the label."
        )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _check_names(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Raise an error for inputs that ``forward`` does not take, and for arguments without a description."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name, one in parameters.items() if one.kind in by_name]
    unknown = [name for name in names if name not in known]
    missing = [
        name for name in known if parameters[name].default is inspect.Parameter.empty and name not in names
    ]
    if unknown or missing:
        what = f"{unknown[0]!r}, which it does not take" if unknown else f"no {missing[0]!r}, which it needs"
        raise OptionError(
            f"model_desc describes as inputs of {type(model).__name__}.forward {what}; its arguments are "
            f"({', '.join(known)}). Name the inputs as forward does, and the label of a loss_fn last."
        )


def _refuse_two_owners(model: torch.nn.Module, loss_fn: torch.nn.Module) -> None:
    """Raise an error for weights of model and loss function that have the same name."""
    both = {f"loss_fn.{name}" for name in loss_fn.state_dict()} & model.state_dict().keys()
    if both:
        raise OptionError(
            f"The model and the loss_fn both have a weight {sorted(both)[0]!r}; rename the model's "
            f"attribute loss_fn."
        )
