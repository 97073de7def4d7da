"""Libraries of regions in this process, and how Python calls one of their functions."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch2ort.cache.store.manifest import sha256
from torch2ort.errors import EngineError
from torch2ort.kernels.regions.region import Region
from torch2ort.kernels.regions.source import Program


@dataclass(frozen=True)
class NativeRegion:
    """A region that is called by an address, from Python or, without it, by a node.

    Attributes:
        address: of the function, which takes the addresses of all memory and gives 0 if it succeeded.
        region: what it computes.
        program: what memory it takes.
    """

    address: int
    region: Region
    program: Program

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The region's outputs for inputs that :meth:`Region.check` lets pass.

        Raises:
            EngineError: the library gave up.
        """
        outputs = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in self.program.outputs]
        sizes = self.program.temporaries
        between = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        memory = [t.data_ptr() for t in (*tensors, *outputs, *between)]
        function = _PROTOTYPE(self.address)
        if function((ctypes.c_void_p * len(memory))(*memory)) != 0:
            raise EngineError("a fused region failed. With Options(fuse=False) operators run one by one")
        return outputs


@dataclass
class _Loaded:
    """By the hash of a library's bytes, that library, which stays until the process ends."""

    libraries: dict[str, ctypes.CDLL] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LOADED = _Loaded()
# ctypes gives up Python's lock for the length of the call.
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


def loaded(library: bytes, region: Region, program: Program) -> NativeRegion:
    """A region of a library.

    Args:
        library: its file.
        region: what is called.
        program: how it is called.

    Raises:
        OSError: the file is no library for this machine.
        AttributeError: it has no such function.
    """
    name = sha256(library)
    with _LOADED.lock:
        if name not in _LOADED.libraries:
            with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
                path = Path(folder, "regions.so")
                path.write_bytes(library)
                _LOADED.libraries[name] = ctypes.CDLL(str(path))
        function = getattr(_LOADED.libraries[name], program.entry)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return NativeRegion(address, region, program)
