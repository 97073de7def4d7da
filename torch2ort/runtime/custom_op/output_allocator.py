"""Large outputs of Functions that onnxruntime takes as they are.

A Function allocates its output with torch; the custom operator can only ask onnxruntime for memory and copy
into it. The copy is saved by an allocator of ours, which gives onnxruntime the output's own memory when it
asks. As onnxruntime may write into that memory later, nobody else may hold it.
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
    """Whether, besides the caller's handle, one tensor alone holds memory that torch allocated."""
    holders = private.storage_use_count(storage), sys.getrefcount(storage)
    return holders == _sole_holders() and storage.resizable() and not storage.is_shared()


@functools.cache
def _sole_holders() -> tuple[int, int] | None:
    """What a storage with one tensor and one handle looks like; ``None`` if other holders do not show."""
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

    # Called from C with one reference of the caller's, as the custom operator calls is_sole_holder.
    storages.sort(key=count)
    del alias, held
    return measured[0]


@contextlib.contextmanager
def lent_allocator(session_options: Any) -> Iterator[bool]:
    """Let the session that is made inside take large outputs without a copy, where onnxruntime can.

    Args:
        session_options: the session's, with the custom operator registered. They must be of nobody else's
            making, as they are changed.

    Returns:
        Whether it can.
    """
    with _lending:
        lent = native.lend_allocator()
        try:
            if lent:
                session_options.add_session_config_entry("session.use_env_allocators", "1")
                # A pattern has memory for the outputs laid out before the Functions run.
                session_options.enable_mem_pattern = False
            yield lent
        finally:
            native.withdraw_allocator()


def forget_output_sizes(graph: onnx.GraphProto) -> None:
    """Drop what ``graph`` says of the sizes of PythonOp outputs, in place.

    Where onnxruntime knows that an earlier value of the same size is no longer needed, it has the output in
    that value's memory instead of asking for memory.
    """
    outputs = {name for node in python_op_nodes(graph) for name in node.output}
    kept = [value for value in graph.value_info if value.name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(kept)
