"""Resolution of the Functions' names in a file to classes, and checks that the classes match the calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch

from torch2ort.errors import ModelLoadError
from torch2ort.fusion.region_function import FusedRegion
from torch2ort.graph.op_allowlist import check_index_check, check_kernel_call, check_region, text_of
from torch2ort.kernels.functions import AtenKernel, Bernoulli, Dropout, DropoutNoise, decode_library_call
from torch2ort.kernels.index_check import IndexCheck
from torch2ort.kernels.library import LibraryKernel
from torch2ort.kernels.packed_attention import PackedAttention, PackedAttentionGrad
from torch2ort.pythonop import Site, qualified_name, resolve, uses_setup_context

FunctionClass = type[torch.autograd.Function]

# Names that exported graphs give to PyTorch's own kernels; they need no registration.
_OWN: dict[str, FunctionClass] = {
    qualified_name(f): f
    for f in (
        *(AtenKernel, Bernoulli, Dropout, DropoutNoise, IndexCheck, FusedRegion, LibraryKernel),
        *(PackedAttention, PackedAttentionGrad),
    )
}


def bind_classes(
    sites: Iterable[Site], functions: Iterable[FunctionClass] = (), *, has_libraries: bool = False
) -> None:
    """Set the class of each of a file's sites.

    A name refers to one of ``functions``, to a class passed to ``register_function``, or to one of
    torch2ort's own kernels. Nothing is imported.

    Args:
        sites: as :func:`torch2ort.pythonop.load_site` returns them.
        functions: classes; those of one qualified name in the order of their numbers.
        has_libraries: whether operators that a library registered may be called; these may do anything.

    Raises:
        FunctionNotFoundError: names are not resolved; lists all of them.
        ModelLoadError: a class does not accept the arguments of a site, a kernel is not allowed in files, or
            an operator is not registered.
    """
    sites = list(sites)
    classes = resolve([s.func_name for s in sites if s.func_name not in _OWN], functions)
    signatures: dict[FunctionClass, inspect.Signature | None] = {}
    for site in sites:
        function = site.function = _OWN.get(site.func_name) or classes[site.func_name]
        if function not in signatures:
            signatures[function] = _signature(function)
        _check_signature(site, function, signatures[function])
        if site.function is AtenKernel:
            check_kernel_call(site)
        elif site.function is IndexCheck:
            check_index_check(site)
        elif site.function is FusedRegion:
            check_region(site)
        elif site.function is LibraryKernel:
            _check_library_call(site, has_libraries=has_libraries)


def _check_library_call(site: Site, *, has_libraries: bool) -> None:
    call = decode_library_call(text_of(site))
    if not has_libraries:
        raise ModelLoadError(
            f"the model calls {call.operator.name()}, an operator of a library, which no file may call, as "
            f"it may do anything. If the model is yours, put the call into a torch.autograd.Function"
        )


def _signature(function: FunctionClass) -> inspect.Signature | None:
    """Return the signature of ``forward``; ``None`` if it is not in Python: the call itself then raises."""
    try:
        return inspect.signature(function.forward)
    except (TypeError, ValueError):
        return None


def _check_signature(site: Site, function: FunctionClass, signature: inspect.Signature | None) -> None:
    """Raise :class:`ModelLoadError` if ``forward`` does not accept the site's number of arguments."""
    if signature is None:
        return
    context = () if uses_setup_context(function) else (None,)
    try:
        signature.bind(*context, *site.arguments)
    except TypeError as error:
        raise ModelLoadError(
            f"PythonOp {site.func_name}: the model calls it with {len(site.arguments)} arguments, but "
            f"{qualified_name(function)}.forward{signature} does not accept them ({error}). Supply the class "
            f"as it was when the model was exported, or export the model again"
        ) from error
