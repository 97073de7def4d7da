"""Which classes the names in a file stand for, and whether those classes still are what was exported."""

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
from torch2ort.pythonop import Site, qualified_name, resolve, uses_setup_context

FunctionClass = type[torch.autograd.Function]

# Names that exported graphs give to PyTorch's own kernels; nobody has to register them.
_OWN: dict[str, FunctionClass] = {
    qualified_name(f): f
    for f in (AtenKernel, Bernoulli, Dropout, DropoutNoise, IndexCheck, FusedRegion, LibraryKernel)
}


def bind_classes(
    sites: Iterable[Site], functions: Iterable[FunctionClass] = (), *, has_libraries: bool = False
) -> None:
    """Give each of a file's sites its class.

    A name stands for one of ``functions``, for what ``register_function`` was given, or for a kernel of
    torch2ort's own. Nothing is imported.

    Args:
        sites: as :func:`torch2ort.pythonop.load_site` gives them.
        functions: classes, those of one qualified name in the order of their numbers.
        has_libraries: whether any operator that a library registered may be called, which may do anything.

    Raises:
        FunctionNotFoundError: names stand for nothing; lists all of them.
        ModelLoadError: a class cannot be called the way the site calls it, a kernel is not for files, or an
            operator is not registered here.
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
    """Of ``forward``; ``None`` if that is not written in Python, so that the call itself will tell."""
    try:
        return inspect.signature(function.forward)
    except (TypeError, ValueError):
        return None


def _check_signature(site: Site, function: FunctionClass, signature: inspect.Signature | None) -> None:
    """Raise :class:`ModelLoadError` if ``forward`` does not take as many arguments as the site has."""
    if signature is None:
        return
    context = () if uses_setup_context(function) else (None,)
    try:
        signature.bind(*context, *site.arguments)
    except TypeError as error:
        raise ModelLoadError(
            f"PythonOp {site.func_name}: the model calls it with {len(site.arguments)} arguments, but "
            f"{qualified_name(function)}.forward{signature} does not take them ({error}). Supply the class "
            f"as it was when the model was exported, or export the model again"
        ) from error
