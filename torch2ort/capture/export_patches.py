"""Patches during an export, for code that PyTorch can run and torch.export cannot trace."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch2ort._torch import export as private
from torch2ort._torch.export import BatchNorm, mask_is_a_mask
from torch2ort.capture import distribution_checks, undeclared_view_ops
from torch2ort.capture.inference_mode import InferenceTensors
from torch2ort.effects import refuse_call, refuse_state
from torch2ort.errors import ExportError
from torch2ort.kernels import recurrent
from torch2ort.support.source_lines import line_in
from torch2ort.support.user_warnings import warn


@contextlib.contextmanager
def traceable_modules(model: torch.nn.Module) -> Iterator[None]:
    """Make the modules below ``model`` traceable; they are restored afterwards."""
    changed = [m for m in model.modules() if isinstance(m, BatchNorm) and _averages_over_all_batches(m)]
    for module in changed:
        module.__dict__["forward"] = functools.partial(_cumulative_batch_norm, module)
    try:
        with mask_is_a_mask():
            yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _averages_over_all_batches(module: BatchNorm) -> bool:
    return (
        module.training
        and module.track_running_stats
        and module.momentum is None
        and "forward" not in module.__dict__
    )


def _cumulative_batch_norm(module: BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Compute BatchNorm with ``momentum=None``: the running statistics are the average over all batches.

    PyTorch's own forward computes the factor ``1 / num_batches_tracked`` as a Python number.
    """
    module._check_input_dim(x)
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    running = (module.running_mean, module.running_var)
    # With a momentum of 1 they become the statistics of this batch.
    mean, variance = (statistic.detach().clone() for statistic in running)
    result = torch.nn.functional.batch_norm(
        x, mean, variance, module.weight, module.bias, True, 1.0, module.eps
    )
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        factor = module.num_batches_tracked.to(mean.dtype).reciprocal()
        for average, found in zip(running, (mean, variance), strict=True):
            average.copy_(average * (1 - factor) + found * factor)
    return result


@contextlib.contextmanager
def assigned_buffers_written(model: torch.nn.Module) -> Iterator[None]:
    """Write assigned values to buffers, as torch.export supports an assignment in a single module only.

    A warning is issued where a graph cannot do that: for another size, or for a gradient that is carried from
    call to call.
    """
    before = {
        (prefix + name): (module._buffers, name, buffer)
        for path, module in model.named_modules()
        for prefix in [f"{path}." if path else ""]
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    yield
    for path, (holder, name, buffer) in before.items():
        assigned = holder.get(name)
        if assigned is buffer or assigned is None:
            continue
        holder[name] = buffer
        alike = assigned.shape == buffer.shape and assigned.dtype == buffer.dtype
        if alike and not assigned.requires_grad:
            # Only with a gradient: eager keeps the values of the old buffer that it saved.
            with torch.no_grad() if buffer.requires_grad else contextlib.nullcontext():
                buffer.copy_(assigned)
        else:
            warn(
                f"{type(model).__name__}: forward assigns to its buffer '{path}' a {_kind(assigned)} where "
                f"it holds a {_kind(buffer)}. A graph does not carry that from call to call: each call "
                f"starts with the buffer as it is now. Assign a detached tensor of the buffer's size and "
                f"dtype if the next call is to see it"
            )


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    gradient = " that needs a gradient" if tensor.requires_grad else ""
    return f"{dtype} tensor of shape {list(tensor.shape)}{gradient}"


class TracedCode(TorchFunctionMode):
    """Mode that intercepts the calls of torch in the model's code while it is traced.

    ``x.data`` becomes ``x.detach()``, as torch.export loses the former, and recurrent layers become operators
    of torch2ort, as torch.export would fix their length. A hook on a gradient is recorded, as a graph cannot
    contain it.

    Attributes:
        hooked: the stack when the model's code put a hook on a gradient; empty if it did not.
        derived: the stack when it made a tensor of its own require a gradient; empty if it did not.
        used: ids of the tensors that require a gradient and were not read through the modules that hold them.
        outside: the stack when the code used such a tensor that is not the model's, with gradients switched
            on; empty if it did not.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._inference = InferenceTensors()
        self._own = {id(parameter) for parameter in model.parameters()}
        self._onednn = bool(torch.backends.mkldnn.enabled)
        self.used: set[int] = set()
        self.outside: list[traceback.FrameSummary] = []
        self.hooked: list[traceback.FrameSummary] = []
        self.derived: list[traceback.FrameSummary] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or its replacement."""
        if func == _DATA:
            return self._note_result(torch.Tensor.detach, args[0].detach())
        if func in _LEAVES and True in (*args[1:], *(kwargs or {}).values(), len(args) == 1):
            self.derived = self.derived or traceback.extract_stack()
        if func in _HOOKS:
            self.hooked = self.hooked or traceback.extract_stack()
        refuse_call(self._model, func, kwargs or {}, derived=bool(self.derived))
        refuse_state(self._model, func, args, kwargs or {})
        self._inference.refuse_write(func, args)
        for value in (*args, *(kwargs or {}).values()):
            self._note(value)
        if func == private.pack_padded_sequence:
            raise ExportError(
                f"{line_in(traceback.extract_stack())} packs sequences, whose lengths are values inside a "
                f"tensor, so one graph is not valid for every input. Give the padded sequences to the "
                f"recurrent layer, and take each one's last output with torch.gather"
            )
        stands = recurrent.fake_call(func, args, onednn=self._onednn)
        stands = stands or undeclared_view_ops.replacement_for(func, args, kwargs or {})
        stands = stands or distribution_checks.replacement_for(func, args)
        return self._note_result(func, (stands or func)(*args, **(kwargs or {})))

    def _note_result(self, func: Any, result: Any) -> Any:
        self._inference.note(func, result)
        return result

    def _note(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self._note(item)
        # The tensors of the trace itself have other types.
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.requires_grad:
            self.used.add(id(value))
            if id(value) not in self._own and not self.outside and torch.is_grad_enabled():
                self.outside = traceback.extract_stack()


_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_LEAVES: tuple[Any, ...] = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
