"""One start of a training in a process of its own: ``python -m tests.cache.training_process NAME [FILE]``.

Prints as JSON whether the cache was hit, the losses of a few steps on ONNX Runtime and in eager PyTorch,
and every warning of torch2ort.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import sys
import warnings
from typing import Any

import torch

import torch2ort

STEPS = 3


def build(name: str, file: str | None) -> tuple[torch.nn.Module, Any]:
    """The model of that name, or the one that a source file makes, and a batch."""
    torch.manual_seed(3)
    if file is not None:
        spec = importlib.util.spec_from_file_location("net", file)
        assert spec is not None
        source = sys.modules["net"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(source)
        return source.make(), (torch.randn(3, 4),)
    if name == "bert":
        from tests.models.test_transformers import bert, bert_batch

        return bert().train(), bert_batch(4, 8)
    if name == "conv":
        from tests.models.test_convolutional import ConvNet

        return ConvNet(), (torch.randn(4, 3, 12, 12),)
    if name == "demo":
        sys.path.append("examples")
        from char_transformer import CharTransformer

        tokens = torch.randint(20, (2, 9))
        return CharTransformer(20, 8, 16, 2, 2), (tokens[:, :-1], tokens[:, 1:])
    from tests.models.test_autograd_functions import Mlp

    return Mlp(), (torch.randn(5, 6),)


def losses(module: torch.nn.Module, batch: Any) -> list[float]:
    """The losses of a few training steps, the first of which is that of the initial weights."""
    from tests.support.comparison import loss_of

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        loss = loss_of(module(**batch) if isinstance(batch, dict) else module(*batch))
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        found.append(loss.item())
    return found


def restrict() -> None:
    """Take from this process what the environment names: space on disks, the privileges of root."""
    if "FULL_DISK" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    if "NO_PRIVILEGES" in os.environ:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(header, none) == 0


def main() -> None:
    """Train twice, and print the results."""
    torch.set_num_threads(1)
    twin, _ = build(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    model, batch = build(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    restrict()
    if "NO_EXPORT" in os.environ:
        torch.export.export = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch2ort.Torch2OrtWarning)
        module = torch2ort.ORTModule(model)
        found = losses(module, batch)
    cache = module.exported.cache
    print(
        json.dumps(
            {
                "hit": cache.hit,
                "bypass": cache.bypass_reason,
                "losses": found,
                "eager": losses(twin, batch),
                "warnings": [str(w.message) for w in caught if w.category is torch2ort.Torch2OrtWarning],
            }
        )
    )


if __name__ == "__main__":
    main()
