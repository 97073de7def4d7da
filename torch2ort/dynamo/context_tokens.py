"""Tensors that identify the contexts of forward's Functions: AOTAutograd passes tensors alone to backward."""

from __future__ import annotations

import itertools
import weakref

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native

_serial = itertools.count()


class _Memory(bytearray):
    """The memory of a token, which lives as long as a tensor over it does.

    Attributes:
        run: the contexts of the Functions.
    """

    run: native.Run


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def token_of(run: native.Run) -> torch.Tensor:
    """Return a tensor, int64[1], that finds ``run`` as long as it, or another tensor of its memory, lives."""
    serial = next(_serial)
    memory = _Memory(serial.to_bytes(8, "little"))
    memory.run = run
    _memories[serial] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def run_of(token: torch.Tensor) -> native.Run:
    """Return the run that was passed to :func:`token_of`.

    Raises:
        EngineError: no such token lives, as backward was passed a copy of it.
    """
    memory = _memories.get(int(token))
    if memory is None:
        raise EngineError(
            "the contexts of the Functions that forward called are gone, as hooks copied the saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu). Call the compiled code without hooks"
        )
    return memory.run
