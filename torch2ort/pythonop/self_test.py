"""Test export at the start of a process's first export, which checks that calls of Functions are intercepted.

The way in which ``apply`` reaches a Function's code is an implementation detail of torch, and may change
with any release. A Function that is not intercepted is traced through, and silently trains with another
gradient; no other check would detect it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch2ort.errors import ExportError
from torch2ort.pythonop.interception import Capture
from torch2ort.support.versions import installed, remedy

_lock = threading.Lock()
_passed = False


class _Round(torch.autograd.Function):
    """A Function with gradient 1, while that of its forward is 0: traced through, it would not train."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _RoundAgain(_Round):
    """A subclass of a Function."""


_bound = _Round.apply  # as models bind it at import, before anything is intercepted


class _Calls(torch.nn.Module):
    """A model that calls Functions in the ways in which models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round three times."""
        return _RoundAgain.apply(_Round.apply(_bound(x)))  # type: ignore[no-any-return]


def check_interception() -> None:
    """Export a tiny model once per process, and check that the calls of its Functions are sites.

    Raises:
        ExportError: they are not, with this version of torch.
    """
    global _passed
    with _lock:
        if not _passed:
            _check()
            _passed = True


def _check() -> None:
    # The test must not depend on the caller's grad mode and default device.
    with torch.inference_mode(False), torch.device("cpu"), Capture(training=True) as capture:
        sample = torch.ones(1, dtype=torch.float32)
        program = torch.export.export(_Calls(), (sample,), strict=False)
    seen = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    own = torch.ops.torch2ort.python_op.default
    calls = sum(node.target == own for node in program.graph.nodes)
    if len(capture.sites) != 3 or calls != 3 or any("round" in name for name in seen):
        raise ExportError(
            f"torch {installed('torch')} runs autograd Functions where torch2ort cannot see it: of 3 calls "
            f"in a test model, {len(capture.sites)} were seen. A model's Functions would be traced through "
            f"and lose their backward. {remedy('torch')}"
        )
