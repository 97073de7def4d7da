"""A model whose weights are parted among processes, for an export: all of them whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torch2ort.variants.parallel.deepspeed import parted_by_deepspeed
from torch2ort.variants.parallel.fsdp import gathered, sharded_in


@contextlib.contextmanager
def whole(model: torch.nn.Module) -> Iterator[None]:
    """Have FSDP's and DeepSpeed's weights in ``model`` whole, without the hooks that gather them.

    Every process has to come here, as to a call of the model.

    Raises:
        ExportError: FSDP or DeepSpeed does something with the model that a graph would not.
    """
    parted = parted_by_deepspeed(model)
    with gathered(sharded_in(model)), parted.whole() if parted else contextlib.nullcontext():
        yield
