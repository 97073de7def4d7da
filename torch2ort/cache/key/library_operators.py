"""Operators that users or libraries registered with PyTorch's dispatcher, as parts of a key.

A graph calls such an operator, and the kernel is no part of the graph. The operator's schema is, and so is
the code by which a trace learns about its results and about which of them have a gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key.key_builder import ComponentOwner, Unkeyable, Walk

# Namespaces of torch.ops that are part of torch, so torch's version identifies their kernels.
_OF_TORCH = frozenset({"aten", "prim", "prims", "quantized", "higher_order", "torch2ort", "profiler"})


def is_of_torch(namespace: str) -> bool:
    """Return True if ``torch.ops.<namespace>`` is part of torch."""
    return namespace in _OF_TORCH


def check_namespace(namespace: str) -> None:
    """Raise :class:`Unkeyable` for a namespace that is used as a value, unless it is part of torch."""
    if not is_of_torch(namespace):
        raise Unkeyable(
            f"torch.ops.{namespace} as a whole contains registered operators, and it cannot be seen which of "
            f"them are called. Name each, as torch.ops.{namespace}.name"
        )


def write_operator(walk: Walk, operator: Any, write: Callable[[Any], None]) -> None:
    """Write a reference to an operator, or to all overloads of one name.

    Args:
        walk: the walk that receives the component.
        operator: the operator.
        write: writes any value.
    """
    name = private.operator_name(operator)
    walk.atom(name)
    if is_of_torch(name.partition(".")[0]):
        return

    def fill() -> None:
        for overload in private.overloads(operator):
            walk.atom(str(private.schema_of(overload)))
            _write_registered(walk, overload.name(), write)

    walk.refer(f"operator {name}", ("operator", name), fill)


def _write_registered(walk: Walk, name: str, write: Callable[[Any], None]) -> None:
    definition = private.definition_of(name)
    if definition is None:
        kernel = private.fake_kernel_of(name)
        write(kernel)
        if kernel is None:
            walk.atom(_libraries())
        if private.has_derivative_in_python(name):
            walk.refuse(
                f"the derivative of the operator {name} was registered by the operator's name, so that its "
                f"code cannot be compared between processes; define it with torch.library.custom_op"
            )
        return
    counted, derivative = private.FAKE_OF_DEFINITION, private.DERIVATIVE_OF_DEFINITION
    attributes = vars(definition)
    skipped = frozenset(attributes) - {*counted, *derivative}
    walk.guards.attributes(attributes, f"the operator {name}", skipped=skipped, always=True)
    for attribute in counted:
        write(attributes.get(attribute))

    def fill() -> None:
        for attribute in derivative:
            write(attributes.get(attribute))

    # The code of the derivative runs for real in each call, as a Function's does.
    walk.refer(f"derivative of {name}", ("derivative", name), fill, owner=ComponentOwner.FUNCTION)


def _libraries() -> tuple[tuple[str, int, int], ...]:
    """Return the shared libraries loaded for their operators; one of them has this operator's kernels."""
    found = []
    for path in sorted(map(str, torch.ops.loaded_libraries)):
        status = os.stat(path)
        found.append((path, status.st_size, status.st_mtime_ns))
    return tuple(found)
