"""The mapping of a call's arguments and results to the inputs and outputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torch2ort import io_schema
from torch2ort.errors import SchemaError, SchemaMismatchError
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.identical_inputs import Identical, identical

_CONSTANTS: Final = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Interface:
    """The mapping of a call of the model to tensors.

    Attributes:
        signature: names and defaults of the model's arguments.
        inputs: schema of the bound arguments.
        outputs: schema of the model's result.
        sizes: the input sizes that the graph accepts.
        returned: the caches among the outputs that are caches of the call.
        same: the tensors that must be the same object in each call; empty if there are none.
    """

    signature: io_schema.Signature
    inputs: io_schema.Schema
    outputs: io_schema.Schema
    sizes: Sizes
    returned: io_schema.Returned = ()
    same: Identical = ()
    # Shapes and dtypes of checked calls whose arguments are exactly the graph's tensors.
    _checked: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)

    def result(self, bound: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result of the call with these arguments, made of the graph's outputs.

        Args:
            bound: the arguments as :meth:`tensors` returned them.
            tensors: the graph's outputs.
        """
        return io_schema.unflatten_into(bound, self.returned, tensors, self.outputs)

    def tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return the call's tensors in the order of the graph's inputs, and its arguments for :meth:`result`.

        Raises:
            SchemaMismatchError: structure, dtype, rank, a constant or a size differs, or two tensors
                are passed where the exported call had one.
        """
        call = None
        if not (kwargs or self.same or self.returned) and all(map(_is_plain, args)):
            call = tuple((argument.dtype, argument.shape) for argument in args)
            if call in self._checked:
                return list(args), {}
        try:
            bound = self.signature.bind(args, kwargs)
            tensors = self.inputs.match(bound)
            if tensors is None:
                _, schema = io_schema.flatten(bound)
                difference = self.inputs.difference(schema, root="inputs")
                raise SchemaMismatchError(f"the call does not fit the exported model: {difference}")
        except SchemaMismatchError:
            raise
        except (SchemaError, TypeError) as error:
            raise SchemaMismatchError(f"the call does not fit the exported model: {error}") from error
        mismatch = self.sizes.mismatch([t.shape for t in tensors])
        if mismatch is not None:
            raise SchemaMismatchError(f"the call does not fit the exported model: {mismatch}")
        if self.same and self.same != identical(tensors):
            names = [leaf.name for leaf in self.inputs.leaves]
            pairs = [f"'{names[i]}' is '{names[j]}'" for i, j in enumerate(self.same) if i != j]
            raise SchemaMismatchError(
                f"the call does not fit the exported model, in whose call {', '.join(pairs)}, the "
                f"same tensor. Pass one tensor again, or export a call with different ones"
            )
        if call is not None and _are_arguments(tensors, bound):
            self._checked.add(call)
        return tensors, bound


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor


def _are_arguments(tensors: Sequence[torch.Tensor], bound: Mapping[str, Any]) -> bool:
    """Return True if the arguments are exactly these tensors, beside immutable defaults."""
    given = [value for value in bound.values() if type(value) not in _CONSTANTS]
    return len(given) == len(tensors) and all(a is b for a, b in zip(given, tensors, strict=True))
