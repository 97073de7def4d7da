"""Whole weights of a model for an export, where they are partitioned among processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torch2ort.variants.parallel.deepspeed import deepspeed_model
from torch2ort.variants.parallel.fsdp import gathered, sharded_in


@contextlib.contextmanager
def whole(model: torch.nn.Module) -> Iterator[None]:
    """Context in which FSDP's and DeepSpeed's weights of ``model`` are whole, without their gathering hooks.

    Every process must enter it, as it must call the model.

    Raises:
        ExportError: FSDP or DeepSpeed does something with the model that a graph would not.
    """
    parted = deepspeed_model(model)
    with gathered(sharded_in(model)), parted.restore_original() if parted else contextlib.nullcontext():
        yield
