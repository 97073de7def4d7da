"""The processor of this machine, as Linux tells it."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path


@functools.cache
def processor_name() -> str:
    """The processor's name."""
    return _entry("model name") or platform.processor()


@functools.cache
def vendor() -> str:
    """The vendor's name as x86 processors tell it; empty for others."""
    return _entry("vendor_id")


@functools.cache
def has_feature(name: str) -> bool:
    """Whether the processor has an instruction set, by Linux's name for it."""
    return name in (_entry("flags") or _entry("Features")).split()


@functools.cache
def processor_features() -> str:
    """A digest of the instruction sets that the processor has, behind its architecture."""
    features = _entry("flags") or _entry("Features") or platform.processor()
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()}"


def _entry(name: str) -> str:
    """What the first processor says under a name; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "")
