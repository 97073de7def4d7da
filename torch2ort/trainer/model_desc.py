"""The user's description of a model's inputs and outputs, and its comparison with a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort import OptionError, SchemaMismatchError
from torch2ort.trainer.options_schema import OptionsValidator, faults


class InputDescription(NamedTuple):
    """One input: its name, and its sizes, with a name for each size that varies."""

    name: str
    shape: list[str | int]
    dtype: torch.dtype | None = None


class OutputDescription(NamedTuple):
    """One output: its name, its sizes, and True if it is the loss."""

    name: str
    shape: list[str | int]
    is_loss: bool = False
    dtype: torch.dtype | None = None


class IODescription:
    """One input or output, as the older trainer accepted them.

    Args:
        name: its name.
        shape: its sizes, with a name for each size that varies.
        dtype: its dtype, which is checked in each call; ``None`` accepts any.
        num_classes: number of values of a label; unused. The older trainer created sample data with it.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[str | int],
        dtype: torch.dtype | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """A model's inputs and outputs, as the older trainer accepted them; its first output is the loss.

    Args:
        inputs: a list of :class:`IODescription`.
        outputs: a list of :class:`IODescription`.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = inputs
        self.outputs_ = outputs

    def as_dict(self) -> dict[str, Any]:
        """Return the description as the dict that :class:`ModelDesc` accepts, without dtypes."""
        return {
            "inputs": [(one.name_, list(one.shape_)) for one in self.inputs_],
            "outputs": [(one.name_, list(one.shape_), index == 0) for index, one in enumerate(self.outputs_)],
        }


class ModelDesc:
    """A validated description of a model's inputs and outputs.

    >>> desc = ModelDesc({"inputs": [("x", ["batch", 8])], "outputs": [("loss", [], True)]})
    >>> desc.inputs[0].shape
    ['batch', 8]

    Args:
        description: ``{"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}``, or a
            :class:`ModelDescription`. A shape is a list of integers, and of names for sizes that vary.

    Raises:
        OptionError: a ``ValueError`` that lists the path of each fault.

    Attributes:
        inputs: list of :class:`InputDescription`.
        outputs: list of :class:`OutputDescription`.
    """

    def __init__(self, description: Mapping[str, Any] | ModelDescription) -> None:
        dtypes: dict[str, Any] = {}
        if isinstance(description, ModelDescription):
            dtypes = {one.name_: one.dtype_ for one in (*description.inputs_, *description.outputs_)}
            description = description.as_dict()
        if not isinstance(description, Mapping):
            raise OptionError(
                f"model_desc is a {type(description).__name__}; allowed is a dict of 'inputs' and 'outputs'."
            )
        validator = OptionsValidator(_SCHEMA)
        if not validator.validate(dict(description)):
            raise OptionError(f"Invalid model_desc: {'; '.join(faults(validator.errors, description))}.")
        for kind in ("inputs", "outputs"):
            _refuse_repetition(kind, description[kind])
        self.inputs = [
            InputDescription(name, list(shape), dtypes.get(name)) for name, shape in description["inputs"]
        ]
        self.outputs = [
            OutputDescription(one[0], list(one[1]), one[2] if len(one) == 3 else False, dtypes.get(one[0]))
            for one in description["outputs"]
        ]

    def loss_position(self) -> int:
        """Return the position of the output that is the loss.

        Raises:
            OptionError: no output is the loss.
        """
        for position, output in enumerate(self.outputs):
            if output.is_loss:
                return position
        raise OptionError(
            "model_desc names no loss; write its output as (name, shape, True), with an empty list for "
            "the shape."
        )

    def named_outputs(self, names: Sequence[str]) -> list[int]:
        """Return the positions of some outputs, in the order of their names.

        Raises:
            OptionError: a name that no output has.
        """
        positions = {output.name: position for position, output in enumerate(self.outputs)}
        unknown = [name for name in names if name not in positions]
        if unknown:
            raise OptionError(
                f"fetches names {unknown[0]!r}, which is no output; allowed is one of {', '.join(positions)}."
            )
        return [positions[name] for name in names]

    def check_inputs(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Compare a call's inputs with the description.

        Returns:
            The sizes that vary, by name.

        Raises:
            SchemaMismatchError: a rank, size or dtype differs.
        """
        sizes: dict[str, int] = {}
        for description, tensor in zip(self.inputs, tensors, strict=True):
            _check("input", description, tensor, sizes)
        return sizes

    def check_outputs(self, tensors: Sequence[torch.Tensor], sizes: dict[str, int]) -> None:
        """Compare a call's outputs with the description.

        Args:
            tensors: the outputs.
            sizes: the result of :meth:`check_inputs`; not changed.

        Raises:
            SchemaMismatchError: a rank, size or dtype differs.
        """
        sizes = dict(sizes)
        for description, tensor in zip(self.outputs, tensors, strict=True):
            _check("output", description, tensor, sizes)


def _check(
    kind: str, described: InputDescription | OutputDescription, tensor: torch.Tensor, sizes: dict[str, int]
) -> None:
    """Compare one tensor with its description, and record its named sizes."""
    given = list(tensor.shape)
    fits = len(given) == len(described.shape)
    for expected, size in zip(described.shape, given, strict=False):
        fits = fits and (sizes.setdefault(expected, size) if isinstance(expected, str) else expected) == size
    if not fits:
        known = {name: sizes[name] for name in described.shape if isinstance(name, str) and name in sizes}
        where = f" with {', '.join(f'{name} = {size}' for name, size in known.items())}" if known else ""
        raise SchemaMismatchError(
            f"{kind} {described.name!r} has shape {given}; model_desc says {described.shape}{where}."
        )
    if described.dtype is not None and tensor.dtype != described.dtype:
        raise SchemaMismatchError(
            f"{kind} {described.name!r} has dtype {tensor.dtype}; model_desc says {described.dtype}."
        )


def _entry_check(sizes: tuple[int, ...]) -> Callable[[str, Any, Any], None]:
    """Return a check of a single entry."""

    def check(field: str, entry: Any, error: Callable[[str, str], None]) -> None:
        wrong = _wrong_entry(entry, sizes)
        if wrong is not None:
            error(field, wrong)

    return check


def _refuse_repetition(kind: str, entries: Sequence[tuple[Any, ...]]) -> None:
    """Raise an error for two entries of one name, and for two losses."""
    names = [entry[0] for entry in entries]
    repeated = [(index, name) for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        index, name = repeated[0]
        raise OptionError(
            f"Invalid model_desc: {kind}[{index}]: the name {name!r} is there twice; name each once."
        )
    losses = [index for index, entry in enumerate(entries) if entry[2:] == (True,)]
    if len(losses) > 1:
        raise OptionError(
            f"Invalid model_desc: {kind}[{losses[1]}]: is a second loss; set is_loss of one output alone."
        )


def _wrong_entry(entry: Any, sizes: tuple[int, ...]) -> str | None:
    """Return the fault of one tuple, as text; ``None`` if it is valid."""
    if not isinstance(entry, tuple) or len(entry) not in sizes:
        form = "(name, shape)" if sizes == (2,) else "(name, shape) or (name, shape, is_loss)"
        return f"must be a tuple {form}"
    name, shape, *rest = entry
    if not isinstance(name, str) or not name:
        return "must have a name, a text, in front"
    if not isinstance(shape, list):
        return "must have a list as shape"
    if not all(_is_size(size) for size in shape):
        return "must have integers of at least 0, and names, as sizes"
    if rest and not isinstance(rest[0], bool):
        return "must have True or False as is_loss"
    return None


def _is_size(size: object) -> bool:
    if isinstance(size, str):
        return bool(size)
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


_SCHEMA = {
    name: {"type": "list", "required": True, "minlength": 1, "schema": {"check_with": _entry_check(sizes)}}
    for name, sizes in (("inputs", (2,)), ("outputs", (2, 3)))
}
