"""The export cache in two processes: the first one exports, the second one reads its entry.

Both train one step of the same model with one cache folder.
Run it with ``python examples/cache_two_processes.py``. It prints, with a line for each entry of the cache:

    first process: exported in 4.70 s; loss 0.163832, gradient 0.882401
    second process: read out of the cache in 0.08 s; loss 0.163832, gradient 0.882401
    what the cache holds:
    f89f521dd708  2026-11-30 11:05   13.0 KiB  optimised backward  Model
    5 entries, 297.2 KiB
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch
from torch import Tensor, nn

import torch2ort


class Clip(torch.autograd.Function):
    """The identity, whose gradient is clipped."""

    @staticmethod
    def forward(ctx, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.bound, ctx.bound), None


class Model(nn.Module):
    """A transformer's layer between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Clip.apply(self.layer(self.first(x)), 0.1))


def step(folder: str) -> None:
    """Train one step with the cache in `folder`."""
    torch.manual_seed(1)
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(cache_dir=folder, log_level="error"))
    loss = module(torch.randn(4, 6, 8)).square().mean()
    loss.backward()
    gradient = module.get_parameter("first.weight").grad.norm()
    how = "read out of the cache" if module.exported.cache.hit else "exported"
    print(f"{how} in {sum(module.startup.values()):.2f} s; loss {loss:.6f}, gradient {gradient:.6f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        step(sys.argv[1])
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            print(f"{name} process: ", end="", flush=True)
            subprocess.run([sys.executable, __file__, folder], check=True)
        print("what the cache holds:", flush=True)
        subprocess.run([sys.executable, "-m", "torch2ort", "cache", "--dir", folder, "list"], check=True)
