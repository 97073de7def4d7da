"""Peak memory of a training step on ONNX Runtime, as a ratio to eager PyTorch.

Each engine runs in a process of its own. The figure is the peak memory of the process during its third step
(``VmHWM`` of Linux), above its memory before the first: outputs, gradients, optimizer, buffers of either
side. Libraries are imported and a small model is exported before. Memory that an export leaves on the heap
counts, so a process that reads the graphs from the export cache is measured, too.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _models import LAYERS, LENGTH, MODELS, batch

import torch2ort

SIZES = (8, 32)
ROUNDS = 7


def status(entry: str) -> int:
    """Return an entry, in bytes, of the kernel's status of this process."""
    found = re.search(rf"^{entry}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def settle() -> None:
    """Return free memory to the system, and reset the high-water mark."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak(way: str, name: str, size: int, cache: str | None = None) -> int:
    """Return the bytes of the third step of a model, in this process."""
    torch.set_num_threads(1)
    torch2ort.ORTModule(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    model, arguments = MODELS[name](), batch(name, size)
    options = torch2ort.Options(cache_dir=cache or False)
    module = model if way == "eager" else torch2ort.ORTModule(model, options=options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    settle()
    before = status("VmRSS")
    for _ in range(3):
        settle()
        optimizer.zero_grad()
        module(**arguments).loss.backward()
        optimizer.step()
    return status("VmHWM") - before


def measure_in_subprocess(way: str, name: str, size: int, *cache: str) -> int:
    """Return the same from a process of its own."""
    call = [sys.executable, __file__, way, name, str(size), *cache]
    return int(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def compare(name: str, size: int) -> None:
    """Print one line for a model and a batch size."""
    with tempfile.TemporaryDirectory() as cache:
        measure_in_subprocess("torch2ort", name, size, cache)
        ways = {"eager": ("eager",), "exported": ("torch2ort",), "kept": ("torch2ort", cache)}
        found: dict[str, list[int]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, (trains, *folder) in ways.items():
                found[way].append(measure_in_subprocess(trains, name, size, *folder))
    eager, exported, kept = (statistics.median(values) / 1e6 for values in found.values())
    print(
        f"{name} {size}x{LENGTH}, {LAYERS} layers, AdamW step, peak memory: torch2ort {exported / eager:.2f} "
        f"of eager ({exported:.0f} of {eager:.0f} MB), out of the export cache {kept / eager:.2f}",
        flush=True,
    )


def main() -> None:
    """Measure the engine of the command line, or print all lines."""
    if len(sys.argv) > 1:
        way, name, size, *cache = sys.argv[1:]
        print(peak(way, name, int(size), *cache))
        return
    for name in MODELS:
        for size in SIZES:
            compare(name, size)


if __name__ == "__main__":
    main()
