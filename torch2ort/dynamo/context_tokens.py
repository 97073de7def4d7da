"""What a forward's Functions leave for their backward, where AOTAutograd hands on tensors alone."""

from __future__ import annotations

import itertools
import weakref

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native

_serial = itertools.count()


class _Memory(bytearray):
    """The memory of a token, which lives as long as a tensor of it does.

    Attributes:
        run: the contexts of the Functions.
    """

    run: native.Run


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def token_of(run: native.Run) -> torch.Tensor:
    """A tensor, int64[1], that finds ``run`` as long as it, or another one of its memory, lives."""
    serial = next(_serial)
    memory = _Memory(serial.to_bytes(8, "little"))
    memory.run = run
    _memories[serial] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def run_of(token: torch.Tensor) -> native.Run:
    """What :func:`token_of` was given.

    Raises:
        EngineError: no such token lives: what backward was given is a copy of it.
    """
    memory = _memories.get(int(token))
    if memory is None:
        raise EngineError(
            "the contexts of the Functions that forward called are gone, as hooks copied what forward saved "
            "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu). Call the compiled code without hooks"
        )
    return memory.run
