"""Parameters and properties of a checkpoint's state, with the attributes of onnxruntime.training.api."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from torch2ort.artifacts.read_training_json import Description
from torch2ort.errors import OptionError

Property: TypeAlias = "int | float | str"


class ArrayOwner(Protocol):
    """An object that holds the arrays."""

    description: Description

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor."""

    def gradient(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a copy of the sum of a parameter's gradients."""

    def set(self, name: str, value: Any) -> None:
        """Set the value of a tensor."""


class Parameter:
    """One parameter. NumPy's functions accept it as an array.

    Attributes:
        name: its name in the ``state_dict``.
        requires_grad: always True: parameters that are not trained are constants of the graphs.
    """

    requires_grad = True

    def __init__(self, of: ArrayOwner, name: str) -> None:
        self._of, self.name = of, name

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """A copy of its value; it can be set.

        Raises:
            SchemaMismatchError: the new value has another type or shape.
        """
        return self._of.array(self.name)

    @data.setter
    def data(self, value: np.ndarray[Any, Any]) -> None:
        self._of.set(self.name, value)

    @property
    def grad(self) -> np.ndarray[Any, Any] | None:
        """A copy of the sum of its gradients; ``None`` without a module or a gradient."""
        return self._of.gradient(self.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.data, dtype)

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters of a checkpoint by their names; an iteration yields pairs of name and parameter."""

    def __init__(self, of: ArrayOwner) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Parameter:
        self._need(name)
        return Parameter(self._of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._need(name)
        self._of.set(name, value)

    def _need(self, name: str) -> None:
        if name not in self:
            raise KeyError(f"Parameter {name} not found; there are {sorted(self._of.description.parameters)}")

    def __contains__(self, name: object) -> bool:
        return name in self._of.description.parameters

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, Parameter(self._of, name)) for name in self._of.description.parameters)

    def __len__(self) -> int:
        return len(self._of.description.parameters)

    def __repr__(self) -> str:
        return f"Parameters({list(self._of.description.parameters)})"


class Properties:
    """Numbers and texts of the user, stored in checkpoints; an iteration yields pairs of name and value."""

    def __init__(self, values: Mapping[str, Property]) -> None:
        self._values: dict[str, Property] = {}
        for name, value in values.items():
            self[name] = value

    def __getitem__(self, name: str) -> Property:
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(name, str) or type(value) not in (int, float, str):
            raise OptionError(
                f"properties[{name!r}] = {value!r}: expected a name, and an integer, a float or a text"
            )
        self._values[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        return iter(list(self._values.items()))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({self._values})"
