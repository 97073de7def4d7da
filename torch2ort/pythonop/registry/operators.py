"""Translations of torch operators, and gradients of ONNX operators, that users register.

:mod:`torch2ort.symbolics` looks them up; this module contains the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, overload

import onnx
import torch

from torch2ort._torch.autograd_functions import OpOverload
from torch2ort.errors import RegistryError
from torch2ort.pythonop.registry._table import Table, check_callable, did_you_mean, nearest

_F = TypeVar("_F", bound=Callable[..., Any])

symbolics: Table[Callable[..., Any]] = Table("register_symbolic", "a translation")
gradients: Table[Callable[..., Any]] = Table("register_gradient", "a gradient")


@overload
def register_symbolic(operator: str, *, override: bool = False) -> Callable[[_F], _F]: ...
@overload
def register_symbolic(operator: str, symbolic: _F, *, override: bool = False) -> _F: ...
def register_symbolic(
    operator: str, symbolic: _F | None = None, *, override: bool = False
) -> _F | Callable[[_F], _F]:
    """Map an operator of torch, or of a ``torch.library``, to ONNX operators.

    Args:
        operator: ``"aten::name"`` for every overload of it, ``"aten::name.overload"`` for one; also with
            the namespace of a ``torch.library``.
        symbolic: ``symbolic(g, *arguments, **keywords)`` with the arguments of the operator's schema:
            tensors and sizes that vary are :class:`torch2ort.GraphValue`, the others Python values. It
            returns a value, or a tuple of values for several outputs; or ``None``, and the operator is
            exported as if nothing was registered. If it is omitted, a decorator is returned.
        override: whether to replace an entry of the same name.

    Returns:
        ``symbolic``, or a decorator.

    Raises:
        RegistryError: ``operator`` is not an operator's name, ``aten`` has none of that name, ``symbolic``
            is not callable, or the name has a translation already.
    """
    if not isinstance(operator, str) or not re.fullmatch(r"\w+::\w+(\.\w+)?", operator):
        raise RegistryError(
            f"register_symbolic: {operator!r} is no operator of torch; expected a name such as 'aten::gelu' "
            f"or 'mylib::op.overload'"
        )
    if operator.startswith("aten::") and not overloads(operator):
        names = known_operators("aten")
        raise RegistryError(
            f"register_symbolic: torch {torch.__version__} has no operator '{operator}'"
            f"{did_you_mean(nearest(operator, names))}"
        )

    def register(call: _F) -> _F:
        check_callable(call, symbolics.verb, "a translation")
        symbolics.add(operator, None, call, override=override)
        return call

    return register if symbolic is None else register(symbolic)


def known_operators(namespace: str) -> list[str]:
    """Return the names of the operators of a library that were looked up before."""
    library = getattr(torch.ops, namespace)
    return [f"{namespace}::{name}" for name in dir(library) if hasattr(getattr(library, name), "overloads")]


def overloads(operator: str) -> list[OpOverload]:
    """Return the operators that a registered name denotes; none while their library is not loaded."""
    namespace, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return []
    wanted = [overload] if overload else packet.overloads()
    found = [getattr(packet, each, None) for each in wanted]
    return [each for each in found if each is not None]


@overload
def register_gradient(operator: str, *, override: bool = False) -> Callable[[_F], _F]: ...
@overload
def register_gradient(operator: str, gradient: _F, *, override: bool = False) -> _F: ...
def register_gradient(
    operator: str, gradient: _F | None = None, *, override: bool = False
) -> _F | Callable[[_F], _F]:
    """Register the gradient of an ONNX operator.

    Training uses it for a call if all operators of the call have one; any other call keeps PyTorch's
    gradient, or its Function's own ``backward``.

    Args:
        operator: ``"domain::Op"``, or ``"Op"`` for one of ONNX's own.
        gradient: ``gradient(g, inputs, outputs, grads, **attributes)``, called for each node of the operator
            in a graph that is trained. ``inputs`` and ``outputs`` are the node's, ``grads`` the gradients of
            its outputs, the keywords the attributes that the node has; ``g.op`` adds nodes. It returns the
            gradient of the first input, or a tuple with one for each input (``None`` for one that has
            none). If it is omitted, a decorator is returned.
        override: whether to replace an entry of the same name.

    Returns:
        ``gradient``, or a decorator.

    Raises:
        RegistryError: ``operator`` is not an operator's name, ONNX has none of that name, ``gradient`` is
            not callable, or the name has a gradient already.
    """
    if not isinstance(operator, str) or not re.fullmatch(r"([\w.]+::)?\w+", operator):
        raise RegistryError(
            f"register_gradient: {operator!r} is no operator of ONNX; expected a name such as 'Softplus' or "
            f"'com.microsoft::MatMulBnb4'"
        )
    if "::" not in operator and not onnx.defs.has(operator):
        names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
        raise RegistryError(
            f"register_gradient: ONNX has no operator '{operator}'{did_you_mean(nearest(operator, names))}"
        )

    def register(call: _F) -> _F:
        check_callable(call, gradients.verb, "a gradient")
        gradients.add(operator, None, call, override=override)
        return call

    return register if gradient is None else register(gradient)
