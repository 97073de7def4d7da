"""Conversion of a model's tensors to those that torch.export accepts: plain leaves outside of inference mode.

``torch.func.functional_call`` replaces parameters by computed tensors, and tensors made in inference mode can
never be used in autograd. A graph depends on neither: replacements of the tensors are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch2ort import io_schema
from torch2ort._torch import global_state as private
from torch2ort.errors import ExportError
from torch2ort.pythonop import ONNX_TYPES

is_compiled = private.is_compiled


def refuse_untraceable(model: torch.nn.Module) -> None:
    """Refuse a model that cannot be traced as it is.

    Raises:
        ExportError: a lazy module has not created a parameter or buffer yet, a module below the model was
            passed to ``torch.compile`` or ``torch.jit``, or weights are quantised; the message names it.
    """
    kind = type(model).__name__
    for name, module in model.named_modules():
        if name and is_compiled(module):
            raise ExportError(
                f"{kind}: its module '{name}' is what torch.compile returned, which cannot "
                f"be exported; put the module that was given to torch.compile there"
            )
        if isinstance(module, torch.jit.ScriptModule):
            place = f"its module '{name}'" if name else "the model"
            raise ExportError(
                f"{kind}: {place} is a torch.jit.ScriptModule, whose code cannot be exported; put the module "
                f"that it was made of there"
            )
        packed = (k for k, value in vars(module).items() if type(value) is torch.ScriptObject)
        if type(module).__module__.startswith("torch.ao.nn.") and (attribute := next(packed, None)):
            raise ExportError(
                f"{kind}: '{f'{name}.{attribute}'.lstrip('.')}' holds the packed weights of a quantised "
                f"layer, which a graph cannot hold. Export or wrap the model before it is converted"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_quantized:
            raise ExportError(
                f"{kind}: '{name}' is quantised, which a graph cannot hold. Keep it as "
                f"{name.rpartition('.')[2]}.dequantize()"
            )
        if is_lazy(tensor):
            raise ExportError(
                f"{kind}: '{name}' is not initialised, as a lazy module makes it in its "
                f"first call. Call the model once in eager PyTorch, model(*inputs), then export or wrap it"
            )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if all tensors are of PyTorch's own classes, not of subclasses."""
    return _PLAIN.issuperset(map(type, tensors))


def refuse_tensors(tensors: Sequence[torch.Tensor], schema: io_schema.Schema) -> None:
    """Refuse arguments that are no plain strided tensors, for which operators compute something else.

    Raises:
        ExportError: there is such an argument; the message names it.
    """
    for position, tensor in enumerate(tensors):
        if type(tensor) not in _PLAIN:
            kind, remedy = f"a {type(tensor).__name__}", "x.as_subclass(torch.Tensor)"
        elif tensor.is_nested:
            kind, remedy = "nested", "x.to_padded_tensor(0.0)"
        elif tensor.layout is not torch.strided:
            kind, remedy = f"in the layout {tensor.layout}", "x.to_dense()"
        elif tensor.is_complex():
            kind, remedy = f"of {tensor.dtype}", "torch.view_as_real(x)"
        elif tensor.is_quantized:
            kind, remedy = "quantised", "x.dequantize()"
        elif tensor.dtype not in ONNX_TYPES:
            kind, remedy = f"of {tensor.dtype}", "x.float()"
        else:
            continue
        name = schema.leaves[position].name or "input"
        raise ExportError(
            f"the argument '{name}' is {kind}; expected a plain dense torch.Tensor. Pass {remedy}"
        )


def as_plain_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain leaf that replaces ``tensor``: equal, and in the same memory if possible."""
    with torch.inference_mode(False):
        leaf = tensor.clone() if tensor.is_inference() else tensor.detach()
        if type(leaf) is not torch.Tensor:
            leaf = leaf.as_subclass(torch.Tensor)
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(leaf, tensor.requires_grad)
        return leaf.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def plain_leaf_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Replace those parameters and buffers below ``model`` that are not ordinary; restore them afterwards."""
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            tables: tuple[tuple[dict[str, Any], bool], ...] = (
                (module._parameters, True),
                (module._buffers, False),
            )
            for held, is_parameter in tables:
                for name, tensor in held.items():
                    if tensor is None or _is_ordinary(tensor, is_parameter=is_parameter):
                        continue
                    replaced.append((held, name, tensor))
                    # A tensor with several names gets one replacement.
                    if id(tensor) not in made:
                        made[id(tensor)] = _stand_in(tensor, is_parameter=is_parameter)
                    held[name] = made[id(tensor)]
        yield
    finally:
        for held, name, tensor in replaced:
            held[name] = tensor


def _is_ordinary(tensor: torch.Tensor, *, is_parameter: bool) -> bool:
    if is_parameter and not isinstance(tensor, torch.nn.Parameter):
        return False
    return tensor.is_leaf and not tensor.is_inference()


def _stand_in(tensor: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
    leaf = as_plain_leaf(tensor)
    return torch.nn.Parameter(leaf.detach(), tensor.requires_grad) if is_parameter else leaf
