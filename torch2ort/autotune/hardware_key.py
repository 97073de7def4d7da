"""What a measured time hangs on besides what was measured."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from torch2ort.options import Options
from torch2ort.runtime.optimized_model import identity


def machine(options: Options) -> Mapping[str, str]:
    """The processor, the libraries, threads and settings.

    Args:
        options: of the module.
    """
    return {
        **identity(options),
        "processor": _processor(),
        "torch": torch.__version__,
        "opset": str(options.opset),
        "threads": json.dumps([options.intra_op_threads or torch.get_num_threads(), torch.get_num_threads()]),
    }


@functools.cache
def _processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
