"""The processor of this machine, as Linux reports it."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path


@functools.cache
def processor_name() -> str:
    """Return the processor's name."""
    return _entry("model name") or platform.processor()


@functools.cache
def vendor() -> str:
    """Return the vendor's name as x86 processors report it; empty for others."""
    return _entry("vendor_id")


@functools.cache
def has_feature(name: str) -> bool:
    """Return True if the processor has an instruction set, given by its name in Linux."""
    return name in (_entry("flags") or _entry("Features")).split()


@functools.cache
def processor_features() -> str:
    """Return the processor's architecture, and a digest of its instruction sets."""
    features = _entry("flags") or _entry("Features") or platform.processor()
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()}"


def _entry(name: str) -> str:
    """Return the first processor's entry of a name in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "")
