"""Large outputs of Functions that onnxruntime uses without a copy.

A Function allocates its output with torch; the custom operator can only ask onnxruntime for memory and copy
the output into it. An allocator of torch2ort's saves the copy: when onnxruntime asks for the memory, it
returns the output's own. As onnxruntime may write into that memory later, there must be no other reference to
it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import onnx
import torch

from torch2ort._torch import storage as private
from torch2ort.graph.graph_traversal import python_op_nodes
from torch2ort.pythonop.native import native

_lending = threading.Lock()


def is_sole_holder(storage: torch.UntypedStorage) -> bool:
    """Return True if memory that torch allocated has one tensor, and no other reference but the caller's."""
    holders = private.storage_use_count(storage), sys.getrefcount(storage)
    return holders == _sole_holders() and storage.resizable() and not storage.is_shared()


@functools.cache
def _sole_holders() -> tuple[int, int] | None:
    """Return the reference counts of a storage with one tensor and one handle; ``None`` if unreliable."""
    sole = _measure(lambda tensor: None)
    others = (lambda t: t, lambda t: t.view(-1)[1:], lambda t: t.detach(), lambda t: t.untyped_storage())
    return None if sole in [_measure(other) for other in others] else sole


def _measure(hold: Any) -> tuple[int, int]:
    tensor = torch.empty(8)
    storages = [tensor.untyped_storage()]
    alias, held = tensor.detach(), hold(tensor)
    del tensor
    measured: list[tuple[int, int]] = []

    def count(storage: torch.UntypedStorage) -> int:
        measured.append((private.storage_use_count(storage), sys.getrefcount(storage)))
        return 0

    # Called from C with one reference held by the caller, as the custom operator calls is_sole_holder.
    storages.sort(key=count)
    del alias, held
    return measured[0]


@contextlib.contextmanager
def lent_allocator(session_options: Any) -> Iterator[bool]:
    """Let the session that is created inside use large outputs without a copy, where onnxruntime supports it.

    Args:
        session_options: the session's options, with the custom operator registered. They are changed, so no
            other session may use them.

    Returns:
        True if it is supported.
    """
    with _lending:
        lent = native.lend_allocator()
        try:
            if lent:
                session_options.add_session_config_entry("session.use_env_allocators", "1")
                # With a memory pattern, the outputs would get their memory before the Functions run.
                session_options.enable_mem_pattern = False
            yield lent
        finally:
            native.withdraw_allocator()


def forget_output_sizes(graph: onnx.GraphProto) -> None:
    """Drop the sizes of PythonOp outputs from ``graph``, in place.

    If onnxruntime knows that an earlier value of the same size is no longer needed, it reuses that value's
    memory for the output instead of asking the allocator.
    """
    outputs = {name for node in python_op_nodes(graph) for name in node.output}
    kept = [value for value in graph.value_info if value.name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(kept)
