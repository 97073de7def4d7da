"""The machine and the versions of a benchmark run."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def machine() -> str:
    """Return processor and versions as one line."""
    runtimes = ("onnxruntime", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime-gpu")
    installed = {package.name: package.version for package in metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in ("torch", *runtimes) if name in installed]
    return f"on {processor()}, {os.cpu_count()} cores, with {', '.join(found)}"


if __name__ == "__main__":
    print(machine())
