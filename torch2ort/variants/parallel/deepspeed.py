"""Models that DeepSpeed trains: its hooks and attributes, and weights that ZeRO's stage 3 partitions.

Stage 3 gathers the weights of each module in a hook before its forward, frees them (to size 0) in one after
it, and does so again around its backward. A graph runs none of the hooks of the model's submodules: the
weights of all of them are gathered for a call and freed after it, and gathered for its backward and freed
when that ends. Backward reads copies (``torch2ort/training/resharded_weights.py``) and passes each weight its
gradient, which DeepSpeed's hook on the weight reduces and partitions.

All stages record state in attributes of weights and modules, which change in each step and which no forward
reads. They are removed for a call, so a graph is made from the model alone. The names are those of deepspeed
0.19.8, with which this was tried.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import MethodType
from typing import Any

import torch

from torch2ort._torch import call_context as private
from torch2ort.errors import ExportError

_HOOKS = "deepspeed.runtime.zero.parameter_offload"
_INSTRUMENTED = "deepspeed.utils.nvtx"
_OF_WEIGHTS = frozenset(
    (
        "_dp_group",
        "_index_in_param_group",
        "grad_accum",
        "is_external_param",
        "nvme_swapper",
        "param_idx_in_group",
    )
)
_OF_MODULES = frozenset(
    (
        "_external_params",
        "_original_parameters",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "post_bwd_fn",
        "pre_bwd_fn",
    )
)
# Attributes that a weight has in stage 3, and in stages 1 and 2.
_MARKS = frozenset(("ds_id", "_hp_mapping"))
# Each dictionary from which entries were removed, these entries, and the keys before, in order.
_Taken = list[tuple[MutableMapping[Any, Any], dict[Any, Any], list[Any]]]


class DeepSpeedModel:
    """A model that DeepSpeed trains.

    Args:
        model: the model.
        kept: its weights with attributes of DeepSpeed.

    Attributes:
        weights: those that are partitioned among processes.
    """

    def __init__(self, model: torch.nn.Module, kept: Sequence[Any]) -> None:
        self._model = model
        self._kept = kept
        self.weights = [weight for weight in kept if hasattr(weight, "ds_status")]

    @contextlib.contextmanager
    def restore_original(self) -> Iterator[None]:
        """Context that restores the original model: whole weights, no hooks and attributes of DeepSpeed.

        Every process must enter it, as it must call any module whose weights are partitioned.
        """
        with self._whole_weights(), contextlib.ExitStack() as later:
            taken: _Taken = []
            later.callback(_put_back, taken)
            for weight in self._kept:
                _take(vars(weight), _is_book_of_weight, taken)
            # The model's own hooks run around the graph.
            for hooks in (self._model._forward_pre_hooks, self._model._forward_hooks):
                _take(hooks, lambda _, hook: _is_deepspeeds(hook), taken)
            if self.weights:
                for module in self._model.modules():
                    self._take_from(module, taken)
            yield

    def gather_in_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Gather all weights while the backward of a call runs and gradients are accumulated into them.

        Args:
            outputs: the graph's outputs in that call.
        """
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None and self.weights:
            node.register_prehook(lambda _: private.when_backward_ends(self._gather()))

    @contextlib.contextmanager
    def _whole_weights(self) -> Iterator[None]:
        free = self._gather()
        try:
            yield
        finally:
            free()

    def _gather(self) -> Callable[[], None]:
        """Gather the partitioned weights; return the function that frees them."""
        # Weights that the model's own hook gathered, or that are never freed, are not changed.
        missing = [weight for weight in self.weights if weight.ds_status.name == "NOT_AVAILABLE"]
        if missing:
            missing[0].all_gather(param_list=missing)

        def free() -> None:
            if missing:
                missing[0].partition(param_list=missing)

        return free

    def _take_from(self, module: torch.nn.Module, taken: _Taken) -> None:
        if module is not self._model:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                _take(hooks, lambda _, hook: _gathers(hook), taken)
        attributes = vars(module)
        own = attributes.get("_original_parameters")
        _take(attributes, _is_book_of_module, taken)
        if own is not None:
            # The original dictionary: DeepSpeed's own gathers each weight that is read from it.
            taken.append((attributes, {"_parameters": attributes["_parameters"]}, []))
            attributes["_parameters"] = own


def deepspeed_model(model: torch.nn.Module) -> DeepSpeedModel | None:
    """Return ``model`` as one that DeepSpeed trains; ``None`` if it does not.

    Raises:
        ExportError: one of the weights is being gathered at this moment, or DeepSpeed does more with a
            submodule than to gather its weights.
    """
    if "deepspeed" not in sys.modules or not torch.distributed.is_initialized():
        return None
    weights = [(name, p) for name, p in model.named_parameters() if vars(p).keys() & _MARKS]
    if not weights:
        return None
    kind = type(model).__name__
    for name, weight in weights:
        if hasattr(weight, "ds_status") and weight.ds_status.name == "INFLIGHT":
            raise ExportError(
                f"{kind}: DeepSpeed is gathering the weight '{name}' ahead of its use, as it does for "
                f"modules that ran in eager PyTorch before. Set stage3_prefetch_bucket_size to 0"
            )
    for name, module in model.named_modules():
        if name and getattr(module, "_z3_leaf", False):
            raise ExportError(
                f"{kind}: set_z3_leaf_modules was called for its module '{name}', whose gradients DeepSpeed "
                f"takes in a backward hook that a graph does not have. Call it for the ORTModule, or put an "
                f"ORTModule inside of this module"
            )
    return DeepSpeedModel(model, [weight for _, weight in weights])


def _take(found: MutableMapping[Any, Any], is_own: Callable[[Any, Any], bool], taken: _Taken) -> None:
    """Remove entries from a dictionary, and record its former content."""
    own = {key: value for key, value in found.items() if is_own(key, value)}
    if own:
        taken.append((found, own, list(found)))
    for key in own:
        del found[key]


def _put_back(taken: _Taken) -> None:
    for found, own, order in reversed(taken):
        found.update(own)
        if isinstance(found, OrderedDict):
            # These are hooks, which run in order.
            added = [key for key in found if key not in order]
            for key in [*(key for key in order if key in found), *added]:
                found.move_to_end(key)


def _is_book_of_weight(name: str, value: Any) -> bool:
    return name.startswith("ds_") or name in _OF_WEIGHTS or _is_deepspeeds(value)


def _is_book_of_module(name: str, value: Any) -> bool:
    return name.startswith("ds_") or name in _OF_MODULES


def _is_deepspeeds(value: Any) -> bool:
    """Return True if a value is a function, a method or an object of a class of DeepSpeed."""
    value = value.__func__ if isinstance(value, MethodType) else value
    return (getattr(value, "__module__", None) or "").startswith("deepspeed.")


def _gathers(hook: Callable[..., Any]) -> bool:
    """Return True if a hook is one of those by which DeepSpeed gathers and frees weights."""
    if hook.__module__ != _INSTRUMENTED:
        return hook.__module__ == _HOOKS
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(one, "__module__", None) == _HOOKS for one in held)
