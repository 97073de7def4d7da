"""Whose library computes the matrix products of a training step, and what share of the step they are.

Products are not torch2ort's doing, the rest is. So a reader sees what a ratio of another processor says.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable

import onnxruntime
import torch
from torch.profiler import ProfilerActivity, profile

import torch2ort

# Operators that are a matrix product and little else: PyTorch's, and ONNX Runtime's.
EAGER = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
ORT = re.compile(
    r"(Fused)?(MatMul|Gemm)|TransposeMatMul|torch\.ops\.aten\.(mm|addmm|bmm|baddbmm)(\.default)?"
)
STEPS = 5


def eager_library() -> str:
    """Return what PyTorch calls for a product in float32 on the CPU."""
    found = re.search(r"Math Kernel Library Version ([\d.]+)", torch.__config__.show())
    return f"MKL {found[1]}" if found else "its BLAS"


def ort_library() -> str:
    """Return what ONNX Runtime calls for it."""
    return f"MLAS of ONNX Runtime {onnxruntime.__version__}"


def share_in_eager(step: Callable[[], object]) -> float:
    """Return the share of a step in eager PyTorch that is matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        for _ in range(STEPS):
            step()
    times = {event.key: event.self_cpu_time_total for event in taken.key_averages()}
    return sum(time for name, time in times.items() if name in EAGER) / sum(times.values())


def share_on_ort(module: torch2ort.ORTModule, step: Callable[[], object]) -> float:
    """Return the share of a step on ONNX Runtime that is matrix products."""
    seconds = []
    with module.profile(STEPS) as taken:
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    rows = (*taken.operators, *taken.functions)
    products = sum(row.seconds for row in rows if ORT.fullmatch(row.name)) / STEPS
    # The first step makes the sessions that are profiled.
    return products / statistics.median(seconds[1:])


def said_of_products(ratio: float, eager: float, ort: float) -> str:
    """Return what the ratio of two steps is made of, in percent, as only whole ratios are kept by the gate.

    Args:
        ratio: of torch2ort's step to eager's.
        eager: the share of eager's step that is products.
        ort: the same of torch2ort's.
    """
    return (
        f"  matrix products are {eager:.0%} of eager's step ({eager_library()}) and {ort:.0%} of torch2ort's "
        f"({ort_library()}): torch2ort takes {ratio * ort / eager:.0%} of eager's time for them, and "
        f"{ratio * (1 - ort) / (1 - eager):.0%} for the rest"
    )
