"""Memory that this process occupies; Linux only."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path


class _Allocated(ctypes.Structure):
    """``struct mallinfo2`` of the C library: bytes, but for the counts of blocks."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


def resident_bytes() -> int:
    """Bytes of this process, without memory that the C library only holds back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def allocated_bytes() -> int:
    """Bytes that were allocated and not freed, by C's functions and as small Python objects.

    Unlike resident memory it is exact to a few bytes, as allocators' reserves do not count.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Allocated
    found = mallinfo2()
    # Python's own allocator takes its arenas from the system. The mean of its blocks is about 64 bytes.
    return int(found.uordblks + found.hblkhd) + 64 * sys.getallocatedblocks()


def bytes_left_by(step: Callable[[], object]) -> float:
    """Bytes that a call of ``step`` leaves allocated, once caches are full and earlier work is collected.

    Args:
        step: one training step, or one call.

    Returns:
        The bytes of a call, with an error of about 100; memory that is collected now and then does not count.
    """
    found = 0.0
    for steps in (100, 3000):
        bytes_then = [allocated_bytes()]
        for _ in range(4):
            for _ in range(steps):
                step()
            bytes_then.append(allocated_bytes())
        # Memory that is freed once, as that of another test's session, affects only one of the differences.
        found = statistics.median(b - a for a, b in itertools.pairwise(bytes_then[1:])) / steps
        if found < 100:
            break
    return found
