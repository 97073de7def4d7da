"""The abstract run: what a site's ``forward`` gives, found without the model's real data.

In this order: a registered shape inferer; ``forward`` run on fake tensors, whose symbolic sizes come
out as expressions of the inputs' sizes; one run on small real tensors, which tells rank and dtype
and leaves every size a fresh symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch2ort.errors import ExportError
from torch2ort.log import logger
from torch2ort.pythonop import _torch_private as private
from torch2ort.pythonop.native import native
from torch2ort.pythonop.site import TENSOR, Result, Site, TensorType


class UserError(Exception):
    """Carries an exception of the user's ``forward`` out of torch's dispatcher unchanged."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _RngWatch(TorchDispatchMode):
    """Notices operators that draw from the random generator."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        return func(*args, **(kwargs or {}))


def run_forward(site: Site, context: native.Context, arguments: Sequence[Any]) -> Any:
    """``forward`` of the site's Function on ``arguments``, in either of its two styles."""
    function = site.function
    if function is None:
        raise ExportError(f"{site.func_name}: this Function is not resolved to a class, so it cannot run")
    with torch.no_grad():
        if private.uses_setup_context(function):
            outputs = function.forward(*arguments)
            function.setup_context(context, tuple(arguments), outputs)
            return outputs
        return function.forward(context, *arguments)


def fake_outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor outputs of ``site`` as fake tensors; fills ``site.result``.

    Args:
        site: the call.
        inputs: its tensor arguments in call order, fake.

    Raises:
        UserError: ``forward`` raised also on real tensors.
        ExportError: ``forward`` returns something that a graph cannot hold.
    """
    try:
        result, outputs = _observe(site, [_fresh_like(t) for t in inputs])
    except ExportError:
        raise
    except Exception as error:
        logger.debug(
            "%s: forward does not run on fake tensors (%s); running it once on real ones",
            site.func_name,
            error,
        )
        return _outputs_of_real_run(site, inputs)
    site.result = result
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in outputs]


def _outputs_of_real_run(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rank and dtype from one real run; every size becomes a fresh symbol."""
    with private.without_fake_mode(), torch.random.fork_rng(devices=[]):
        sample = [_real_like(t) for t in inputs]
        try:
            site.result, outputs = _observe(site, sample)
        except ExportError:
            raise
        except Exception as error:
            raise UserError(error) from error
        types = [(t.dim(), t.dtype, t.device) for t in outputs]
    context = torch.library.get_ctx()
    return [
        torch.empty([context.new_dynamic_size() for _ in range(rank)], dtype=dtype, device=device)
        for rank, dtype, device in types
    ]


def _fresh_like(tensor: torch.Tensor) -> torch.Tensor:
    # Storage of its own: whether it outlives the call then tells what the Function kept.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _real_like(tensor: torch.Tensor) -> torch.Tensor:
    shape = [private.size_hint(s) for s in tensor.shape]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.rand(shape, device=tensor.device).to(tensor.dtype)
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _observe(site: Site, tensors: list[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
    """Run ``forward`` on ``tensors`` (which this empties) and note all that the graph must know."""
    input_types = tuple(TensorType(t.dtype, t.dim()) for t in tensors)
    positions = site.tensor_positions
    for position, tensor in zip(positions, tensors, strict=True):
        if site.needs_input_grad[position] and tensor.dtype.is_floating_point:
            tensor.requires_grad_(True)
    versions = [private.version_of(t) for t in tensors]
    storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    context = native.Context(site.needs_input_grad)
    with _RngWatch() as watch:
        returned = run_forward(site, context, site.call_arguments(tensors))
    values = returned if isinstance(returned, tuple) else (returned,)
    _refuse_nested_tensors(site, values)
    dirty = {id(t) for t in context.dirty_tensors or ()}
    mutated = tuple(
        p
        for p, t, version in zip(positions, tensors, versions, strict=True)
        if private.version_of(t) != version or id(t) in dirty
    )
    where = {id(t): p for p, t in zip(positions, tensors, strict=True)}
    returned_inputs = {
        i: where[id(v)] for i, v in enumerate(values) if id(v) in where and where[id(v)] in mutated
    }
    hidden = tuple(p for p in mutated if p not in returned_inputs.values())
    outputs = [v for v in values if isinstance(v, torch.Tensor)]
    marked = {id(t) for t in context.non_differentiable or ()}
    non_differentiable = tuple(
        i
        for i, t in enumerate(outputs)
        if id(t) in marked or not (t.dtype.is_floating_point or t.dtype.is_complex)
    )
    outputs = [t.detach() for t in outputs] + [tensors[positions.index(p)].detach() for p in hidden]
    result = Result(
        inputs=input_types,
        outputs=tuple(TENSOR if isinstance(v, torch.Tensor) else v for v in values),
        tensors=tuple(TensorType(t.dtype, t.dim()) for t in outputs),
        returns_tuple=isinstance(returned, tuple),
        non_differentiable=non_differentiable,
        mutated=mutated,
        returned_inputs=tuple(sorted(returned_inputs.items())),
        hidden=hidden,
        uses_rng=watch.seen,
    )
    metadata = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in outputs]
    # Only the Function itself (through ctx, an attribute, a global) may still hold the inputs now.
    del returned, values, outputs, where, tensor
    tensors.clear()
    kept = tuple(p for p, storage in zip(positions, storages, strict=True) if not storage.expired())
    return replace(result, kept=kept), metadata


def _refuse_nested_tensors(site: Site, values: tuple[Any, ...]) -> None:
    for i, value in enumerate(values):
        if isinstance(value, (list, tuple, dict)) and holds_tensor(value):
            raise ExportError(
                f"{site.func_name}: forward returned a {type(value).__name__} with tensors in it as output "
                f"{i}; "
                f"expected a tensor or a tuple of tensors and constants. Return the tensors themselves"
            )


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere inside ``value``."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_tensor(v) for v in value)
    if isinstance(value, dict):
        return any(holds_tensor(v) for v in value.values())
    return False
