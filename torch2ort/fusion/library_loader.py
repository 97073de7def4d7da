"""Libraries of regions that are loaded in this process, and calls of their functions from Python."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch2ort.cache.store.manifest import sha256
from torch2ort.errors import EngineError
from torch2ort.fusion.cpp_source import CppProgram
from torch2ort.fusion.region import Region, shape_of


@dataclass(frozen=True)
class NativeRegion:
    """A region that is called by its address, from Python, or from a node without Python.

    Attributes:
        address: of the function, which takes the addresses of all memory and the varying sizes, and returns 0
            if it succeeded.
        region: its computation.
        program: its outputs and temporaries.
        numbers: address of the function that computes sizes; 0 if no size varies.
    """

    address: int
    region: Region
    program: CppProgram
    numbers: int = 0

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the region's outputs for inputs that :meth:`Region.check` accepts.

        Raises:
            EngineError: the library failed.
        """
        values = self.region.values(tensors)
        outputs = [
            torch.empty(shape_of(sizes, values), dtype=dtype, device="cpu")
            for dtype, sizes in self.program.outputs
        ]
        needed = shape_of(self.program.temporaries, values)
        between = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in needed]
        memory = [t.data_ptr() for t in (*tensors, *outputs, *between)]
        function = _PROTOTYPE(self.address)
        sizes = (ctypes.c_int64 * len(values))(*values.values())
        if function((ctypes.c_void_p * len(memory))(*memory), sizes) != 0:
            raise EngineError("a fused region failed. With Options(fuse=False) operators run one by one")
        return outputs


@dataclass
class _Loaded:
    """Libraries by the hash of their bytes; a library stays loaded until the process ends."""

    libraries: dict[str, ctypes.CDLL] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LOADED = _Loaded()
# ctypes releases the GIL during the call.
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64))


def loaded(library: bytes, region: Region, program: CppProgram) -> NativeRegion:
    """Load a region of a library.

    Args:
        library: the content of its file.
        region: the region.
        program: its calling convention.

    Raises:
        OSError: the file is not a library for this machine.
        AttributeError: the library has no such function.
    """
    name = sha256(library)
    with _LOADED.lock:
        if name not in _LOADED.libraries:
            with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
                path = Path(folder, "regions.so")
                path.write_bytes(library)
                _LOADED.libraries[name] = ctypes.CDLL(str(path))
        found = _LOADED.libraries[name]
        address = _address(getattr(found, program.entry))
        numbers = _address(getattr(found, program.numbers)) if region.varying else 0
    return NativeRegion(address, region, program, numbers)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
