"""The part of a measured time's key that identifies the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from torch2ort.options import Options
from torch2ort.runtime.optimized_model import identity
from torch2ort.support.processor import processor_name


def machine(options: Options) -> Mapping[str, str]:
    """Return the processor, the libraries, threads and settings.

    Args:
        options: the module's options.
    """
    return {
        **identity(options),
        "processor": processor_name(),
        "torch": torch.__version__,
        "opset": str(options.opset),
        "threads": json.dumps([options.intra_op_threads or torch.get_num_threads(), torch.get_num_threads()]),
    }
