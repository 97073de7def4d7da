"""Validation of a site from a file, and of the attributes of the node that contains it.

Runtimes trust a node's attributes: they reserve and reuse memory by them. So only the attributes that an
export of that very site writes may reach a runtime.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import onnx
import torch

from torch2ort.errors import ModelLoadError
from torch2ort.pythonop.site import TENSOR, Result, Site, TensorType

# The largest rank of PyTorch's tensors, and of tensors in the native extension.
MAX_RANK: Final = 64
_POINTERS = frozenset({"input_pointer_scalars", "input_pointer_scalar_positions"})
_CONSTANTS = frozenset(
    f"input_{kind}_{part}"
    for kind in ("bool", "int", "float")
    for part in ("scalars", "scalar_positions", "tuples", "tuple_positions", "tuple_begins")
)
_MAPS = frozenset({"tensor_reuse_map", "bw_tensor_reuse_map"})
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 8
_SHORT.maxstring = _SHORT.maxother = 60


def check_site(site: Site, dtypes: Collection[torch.dtype]) -> None:
    """Raise :class:`ValueError` with the field's name if no call of a Function can have these values.

    Args:
        site: the site, as a file stores it.
        dtypes: the dtypes that a graph supports.
    """
    result = site.known_result
    positions = site.tensor_positions
    outputs = [i for i, value in enumerate(result.outputs) if value is TENSOR]
    _same("needs_input_grad", len(site.needs_input_grad), "entries", len(site.arguments), "arguments")
    _same("inputs", len(result.inputs), "types", len(positions), "tensor arguments")
    if not result.returns_tuple:
        _same("outputs", len(result.outputs), "values", 1, "value outside of a tuple")
    _within("originals", site.originals, positions, "positions of tensor arguments")
    _within("written_back", site.written_back, site.originals, "positions of originals")
    _within("fresh", site.fresh, range(len(site.arguments)), "positions of arguments")
    _within("mutated", result.mutated, positions, "positions of tensor arguments")
    _within("kept", result.kept, positions, "positions of tensor arguments")
    _within("hidden", result.hidden, result.mutated, "positions of mutated arguments")
    _same("tensors", len(result.tensors), "types", len(outputs) + len(result.hidden), "tensor outputs")
    _within("non_differentiable", result.non_differentiable, range(len(result.tensors)), "tensor outputs")
    _within("kept_results", result.kept_results or (), range(len(result.tensors)), "tensor outputs")
    for name in ("inputs", "tensors"):
        for kind in getattr(result, name):
            if kind.dtype not in dtypes or not 0 <= kind.rank <= MAX_RANK:
                raise ValueError(
                    f"'{name}' holds {kind.dtype} of rank {kind.rank}; expected a dtype of ONNX's and a rank "
                    f"from 0 to {MAX_RANK}"
                )
    _check_map("forward_map", result.forward_map, outputs, positions)
    _check_map("backward_map", result.backward_map, positions, outputs)
    _check_map("returned_inputs", result.returned_inputs, outputs, result.mutated)
    _check_map("repeated", result.repeated, outputs, outputs)
    _check_written(site, result, outputs)
    _check_sizes(result, dict(zip(positions, result.inputs, strict=True)))


def _check_sizes(result: Result, inputs: Mapping[int, TensorType]) -> None:
    """Check that sizes are numbers, or sizes of dimensions that arguments have."""
    if not result.sizes:
        return
    _same("sizes", len(result.sizes), "shapes", len(result.tensors), "tensor outputs")
    for kind, sizes in zip(result.tensors, result.sizes, strict=True):
        _same("sizes", len(sizes), "sizes of a shape", kind.rank, "dimensions")
        for size in sizes:
            if isinstance(size, tuple):
                good = size[0] in inputs and 0 <= size[1] < inputs[size[0]].rank
            else:
                good = size is None or size >= 0
            if not good:
                raise ValueError(f"'sizes' holds {size}, which is no size of an output")


def _check_written(site: Site, result: Result, outputs: Sequence[int]) -> None:
    """Check that a mutated argument that is an output has the output's dtype."""
    types = dict(zip(site.tensor_positions, result.inputs, strict=True))
    pairs = [(argument, result.tensors[outputs.index(output)]) for output, argument in result.returned_inputs]
    pairs += zip(result.hidden, result.tensors[len(outputs) :], strict=True)
    for argument, kind in pairs:
        if types[argument].dtype != kind.dtype:
            raise ValueError(
                f"'tensors' says {kind.dtype} of an output that is argument {argument}, and 'inputs' says "
                f"{types[argument].dtype}"
            )


def _same(name: str, given: int, what: str, expected: int, of: str) -> None:
    if given != expected:
        raise ValueError(f"'{name}' holds {given} {what}; expected {expected}, as there are as many {of}")


def _within(name: str, given: Sequence[int], allowed: Collection[int], what: str) -> None:
    if not set(given) <= set(allowed) or len(set(given)) != len(given):
        raise ValueError(
            f"'{name}' is {_SHORT.repr(list(given))}; expected {what}, each at most once: "
            f"{_SHORT.repr(sorted(allowed))}"
        )


def _check_map(
    name: str, pairs: Sequence[tuple[int, int]], keys: Collection[int], values: Collection[int]
) -> None:
    _within(f"{name}, from", [key for key, _ in pairs], keys, "positions of tensors")
    # Two outputs may be one argument.
    _within(f"{name}, to", list({value for _, value in pairs}), values, "positions of tensors")


def check_node(node: onnx.NodeProto, site: Site, expected: Mapping[str, Any]) -> None:
    """Compare a node of a file with the site that it contains.

    Addresses are not compared: they are unused, and no session gets them.

    Args:
        node: PythonOp, or the ATen node of one of PyTorch's kernels.
        site: the site in the node's own attribute.
        expected: the attributes that an export writes for the node of such a site.

    Raises:
        ModelLoadError: they differ; the message names the attribute, its value and the expected value.
    """
    given = {a.name: a for a in node.attribute}
    if len(given) != len(node.attribute):
        raise _disagreement(node, site, "it has two attributes of one name")
    for name in sorted(({*expected} | {*given} & (_CONSTANTS | _MAPS)) - _POINTERS):
        value = _read(given[name]) if name in given else None
        if not _equal(value, expected.get(name)):
            raise _disagreement(
                node,
                site,
                f"its attribute '{name}' is {_said(value)}, but its site was exported with "
                f"{_said(expected.get(name))}",
            )
    inputs, outputs = len(site.tensor_positions), 1 + len(site.known_result.tensors)
    if len(node.input) != inputs or "" in node.input:
        raise _disagreement(
            node, site, f"it has {_count(node.input)} inputs, but its site was exported with {inputs}"
        )
    if len(node.output) != outputs:
        raise _disagreement(
            node, site, f"it has {len(node.output)} outputs, but its site was exported with {outputs}"
        )


def _disagreement(node: onnx.NodeProto, site: Site, what: str) -> ModelLoadError:
    return ModelLoadError(f"PythonOp {site.func_name} (node '{node.name}'): {what}; export the model again")


def _read(attribute: onnx.AttributeProto) -> Any:
    """Return the value: ``int``, ``str``, or a list of ``int`` or ``float``; for another type its name."""
    kinds = onnx.AttributeProto
    if attribute.ref_attr_name:
        return f"that of a function's attribute {attribute.ref_attr_name!r}"
    if attribute.type == kinds.STRING:
        return attribute.s.decode(errors="replace")
    if attribute.type == kinds.INT:
        return attribute.i
    if attribute.type in (kinds.INTS, kinds.FLOATS):
        return list(attribute.ints if attribute.type == kinds.INTS else attribute.floats)
    return f"of type {kinds.AttributeType.Name(attribute.type)}"


def _equal(given: Any, expected: Any) -> bool:
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    # NaN equals NaN here.
    return type(given) is type(expected) and (given == expected or given != given != expected != expected)


def _said(value: Any) -> str:
    return "missing" if value is None else _SHORT.repr(value)


def _count(names: Sequence[str]) -> int:
    return sum(name != "" for name in names)
