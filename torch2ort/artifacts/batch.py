"""Conversion of a batch to the input tensors of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torch2ort.artifacts.read_training_json import Description
from torch2ort.errors import SchemaMismatchError
from torch2ort.graph.accepted_sizes import Sizes


class BatchReader:
    """A reader that finds the tensors in a batch and compares them with those of the sample.

    Args:
        description: of the training step, with the structure and tensors of a batch.
    """

    def __init__(self, description: Description) -> None:
        inputs = description.inputs
        self._structure = description.batch
        self._dtypes = {name: np.dtype(one.dtype) for name, one in inputs.items()}
        dims = [one.shape for one in inputs.values()]
        ranges = {name: (low or 0, high) for name, (low, high) in description.ranges.items()}
        self._sizes = Sizes(tuple(inputs), dims, ranges, description.guards)

    def read(self, batch: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays of a batch by the names of the graph's inputs.

        Raises:
            SchemaMismatchError: structure, type or a size differs from the sample's; names the place, what
                was expected and what was given.
        """
        found: dict[str, np.ndarray[Any, Any]] = {}
        self._walk(self._structure, batch, "batch", found)
        shapes = []
        for name, dtype in self._dtypes.items():
            array = found[name]
            if array.dtype != dtype:
                raise SchemaMismatchError(f"batch: input '{name}': expected {dtype}, got {array.dtype}")
            shapes.append(array.shape)
        mismatch = self._sizes.mismatch(shapes)
        if mismatch is not None:
            raise SchemaMismatchError(f"batch: {mismatch}")
        return found

    def _walk(self, structure: Any, value: Any, path: str, found: dict[str, np.ndarray[Any, Any]]) -> None:
        if "tensor" in structure:
            if not isinstance(value, np.ndarray):
                if not hasattr(value, "__array__"):
                    _differs(path, f"the numpy array {structure['tensor']!r}", value)
                value = _array(path, structure["tensor"], value)
            found[structure["tensor"]] = value
        elif "constant" in structure:
            wanted = structure["constant"]
            # Texts are compared, as NaN does not equal itself, and 0.0 equals -0.0.
            if type(value) is not type(wanted) or repr(value) != repr(wanted):
                _differs(path, f"{wanted!r}, as in the sample", value)
        elif "dict" in structure:
            wanted = structure["dict"]
            if not isinstance(value, Mapping) or value.keys() != wanted.keys():
                _differs(path, f"a dict with {sorted(wanted)}", value)
            for key, child in wanted.items():
                self._walk(child, value[key], f"{path}[{key!r}]", found)
        else:
            kind, wanted = next(iter(structure.items()))
            if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
                _differs(path, f"a {kind} of {len(wanted)}", value)
            for i, child in enumerate(wanted):
                self._walk(child, value[i], f"{path}[{i}]", found)


def _array(path: str, name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return an array of another library as a NumPy array, if NumPy can read it."""
    try:
        return np.asarray(value)
    except Exception as error:
        raise SchemaMismatchError(
            f"{path}: expected the numpy array {name!r}, given a {type(value).__name__} that NumPy cannot "
            f"read ({error})"
        ) from error


def _differs(path: str, expected: str, given: Any) -> None:
    if isinstance(given, Mapping):
        what = f"a {type(given).__name__} with {sorted(map(str, given))}"
    elif isinstance(given, (tuple, list)):
        what = f"a {type(given).__name__} of {len(given)}"
    else:
        what = (
            f"{given!r}" if isinstance(given, (int, float, str, type(None))) else f"a {type(given).__name__}"
        )
    raise SchemaMismatchError(f"{path}: expected {expected}, given {what}")
