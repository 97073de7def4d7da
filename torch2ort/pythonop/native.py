"""The native extension, configured with the functions of torch and of this package that it needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch2ort import _native
from torch2ort import _native as native
from torch2ort._torch import autograd_functions as private
from torch2ort.errors import EngineError, InplaceMapError
from torch2ort.pythonop.site import Site
from torch2ort.support.user_warnings import warn

__all__ = ["native", "note_exported", "note_savings"]


# Per native site: the exported site that it was made from. Each session has native sites of its own.
_exported: weakref.WeakKeyDictionary[_native.Site, Site] = weakref.WeakKeyDictionary()
# Per native site: pairs of an in-place map that would save a copy. If a site has no entry, all pairs would.
_savings: weakref.WeakKeyDictionary[_native.Site, set[tuple[str, int, int]]] = weakref.WeakKeyDictionary()
# Per exported site: the aliasing that a warning has reported.
_warned: weakref.WeakKeyDictionary[Site, set[tuple[str, int]]] = weakref.WeakKeyDictionary()


def backward_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the function that computes a Function's gradients from its context and output gradients."""
    # `vjp` and `backward` are synonyms: a class may define either.
    base = torch.autograd.Function
    overrides_backward = function.backward is not base.backward
    backward: Callable[..., Any] = function.backward
    if not overrides_backward and function.vjp is not base.vjp:
        backward = function.vjp
    # From torch 2.14 on a Function may ask for its gradients in one list, which it may empty.
    if getattr(base, "boxed_grads_call", None) is None or not getattr(function, "boxed_grads_call", False):
        return backward
    return lambda ctx, *gradients: backward(ctx, list(gradients))


def note_exported(site: _native.Site, exported: Site) -> None:
    """Record the exported site of a native site, for its warnings."""
    _exported[site] = exported


def note_savings(site: _native.Site, pairs: Iterable[tuple[str, int, int]]) -> None:
    """Restrict warnings of a native site to in-place maps that would save a copy.

    Args:
        site: the native site.
        pairs: ``"forward"``, output and argument, or ``"backward"``, argument and output. Those of earlier
            calls are kept.
    """
    _savings.setdefault(site, set()).update(pairs)


def _warn_alias(site: _native.Site, kind: str, output: int, argument: int) -> None:
    savings = _savings.get(site)
    if savings is not None and (kind, output, argument) not in savings:
        return
    exported = _exported.get(site)
    if exported is not None:
        if exported.internal:
            # Users cannot register maps for PyTorch's own kernels.
            return
        result = exported.known_result
        declared = result.forward_map if kind == "forward" else result.backward_map
        warned = _warned.setdefault(exported, set())
        # A declared map may not help in a session's graph in which other nodes read the same memory.
        if (output, argument) in declared or (kind, output) in warned:
            return
        warned.add((kind, output))
    name = site.name.partition("#")[0]
    if kind == "forward":
        what = f"output {output} shares memory with argument {argument}"
    else:
        what = f"the gradient of argument {output} shares memory with the gradient of output {argument}"
    warn(
        f"{site.name}: {what}, which was made correct by a copy. To save the copy, declare "
        f"torch2ort.register_inplace_map({name!r}, {kind}={{{output}: {argument}}})"
    )


def _privatize(tensor: torch.Tensor) -> None:
    """Move the storage of ``tensor``, and so of every view of it, to memory of its own."""
    # This copies the bytes and swaps the storage's memory in place; there is no other public way.
    tensor.untyped_storage().share_memory_()


_native.configure(
    exchange_api=torch.Tensor.__dlpack_c_exchange_api__,
    tensor_type=torch.Tensor,
    privatize=_privatize,
    warn_alias=_warn_alias,
    use_count=private.use_count,
    is_base_held=private.is_base_held,
    error_type=EngineError,
    inplace_error_type=InplaceMapError,
)
_native.find_layout(*private.tensors_of_known_memory())
