"""Outputs that are views: of an argument, of a parameter or buffer, or of another output.

A graph returns copies. The caller may write to a view, or compare memory, so the operators that made the view
in the trace run again on the caller's own tensor, or on the output that it is a view of, with autograd as in
eager PyTorch. A view of a tensor that the caller does not get remains a copy, unless another output covers
all of that memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from torch2ort._torch import dispatch as private
from torch2ort.pythonop.attributes import dump_constant, load_constant

ITEM: Final = "item"


@dataclass(frozen=True)
class Step:
    """One operator that makes a view of its first argument.

    Attributes:
        operator: such as ``aten.view.default``, or ``item`` for one of several results.
        args: further arguments; a text is an expression for a size.
        kwargs: keyword arguments.
        recorded: True if autograd recorded it, which it does not under ``torch.no_grad()``.
    """

    operator: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    recorded: bool = True


@dataclass(frozen=True)
class OutputView:
    """An output that is made from a tensor of the caller.

    Attributes:
        base: origin of that tensor.
        steps: the operators that make the view.
    """

    base: tuple[str, int | str]
    steps: tuple[Step, ...]

    def to_json(self) -> Any:
        """Return the view in a form for JSON."""
        steps = [
            [s.operator, dump_constant(s.args), dump_constant(dict(s.kwargs or {})), s.recorded]
            for s in self.steps
        ]
        return [list(self.base), steps]

    @classmethod
    def from_json(cls, data: Any) -> OutputView:
        """Load the result of :meth:`to_json`."""
        base, steps = data
        made = (
            Step(name, load_constant(args), load_constant(kw), bool(seen)) for name, args, kw, seen in steps
        )
        return cls((base[0], base[1]), tuple(made))

    def of(self, base: torch.Tensor, values: Mapping[str, int]) -> torch.Tensor | None:
        """Make the view; return ``None`` if it is a copy, because of other strides than in the sample.

        Args:
            base: the tensor.
            values: the sizes of the call's arguments, by symbol.
        """
        result: Any = base
        for step in self.steps:
            args = _evaluated(step.args, values)
            if step.operator == ITEM:
                result = result[args[0]]
                continue
            kwargs = _evaluated(step.kwargs or {}, values)
            with torch.set_grad_enabled(torch.is_grad_enabled() and step.recorded):
                result = view_operator(step.operator)(result, *args, **kwargs)
        same = result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return result if same else None


def view_operator(name: str) -> Any:
    """Return the ATen operator ``name``.

    Raises:
        ValueError: the operator makes no views.
    """
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None) if namespace == "aten" else None
    if found is None or not makes_views(found):
        raise ValueError(f"{name} makes no view")
    return found


def makes_views(target: Any) -> bool:
    """Return True if an operator's results may be views of its first argument, and it writes nothing."""
    if not isinstance(target, private.OpOverload):
        return False
    schema = target._schema
    if schema.is_mutable or not schema.arguments or not schema.returns:
        return False
    return schema.arguments[0].alias_info is not None and schema.returns[0].alias_info is not None


def _evaluated(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, str):
        from torch2ort.sizes import expressions as sizes  # sympy is slow to import, and few outputs are views

        return sizes.evaluate(sizes.parse(value), values)
    if isinstance(value, tuple):
        return tuple(_evaluated(v, values) for v in value)
    if isinstance(value, Mapping):
        return {key: _evaluated(v, values) for key, v in value.items()}
    return value


def put_views(
    outputs: list[torch.Tensor],
    views: Sequence[OutputView | None],
    tracked: Sequence[bool],
    inputs: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    dims: Sequence[Sequence[int | str]],
) -> None:
    """Replace the graph's copies of views in ``outputs`` by views.

    Args:
        outputs: outputs of the run, after :func:`torch2ort.capture.aliased_outputs.put_back`.
        views: a view or ``None`` for each.
        tracked: for each, True if it requires a gradient.
        inputs: the call's tensors.
        weights: the model's tensors, by name.
        dims: sizes of each input: numbers, or the names of symbols.
    """
    values = {
        name: size
        for names, tensor in zip(dims, inputs, strict=True)
        for name, size in zip(names, tensor.shape, strict=True)
        if isinstance(name, str)
    }
    for position, view in enumerate(views):
        if view is None:
            continue
        kind, where = view.base
        if isinstance(where, str):
            base = weights.get(where)
        else:
            base = (inputs if kind == "input" else outputs)[where]
        if base is None:
            continue
        # Otherwise the caller's grad mode could make a view require a gradient that requires none in eager.
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracked[position]):
            found = view.of(base, values)
        if found is not None:
            outputs[position] = found
