"""Train one model in two processes, each of which holds half of every weight (tensor parallelism).

The first weight is split by its outputs, the second by its inputs. Two autograd Functions exchange tensors
between the halves, as nodes that call ``torch.distributed``, in eager PyTorch and on ONNX Runtime.
Run it with ``python examples/two_processes.py``; ``--help`` lists the settings. It prints:

    Functions in the graph of each process: __mp_main__.Copy, __mp_main__.Reduce
    Loss: 4.6654 to 0.6604. Largest difference: 2.4e-07
    Loss plot: two_processes.png
"""

from __future__ import annotations

import copy
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shared import save_plot, settings, train
from torch import Tensor, nn

import torch2ort


def add_up(ctx, x: Tensor) -> Tensor:
    """Return the sum of the tensors of both processes."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class Copy(torch.autograd.Function):
    """Passes the same input to each process; backward adds up their gradients."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(add_up)


class Reduce(torch.autograd.Function):
    """Adds up the processes' results; backward passes the whole gradient to each."""

    forward = staticmethod(add_up)
    backward = staticmethod(lambda ctx, grad: grad.clone())


class Half(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(Copy.apply(x)))
        return nn.functional.mse_loss(Reduce.apply(self.last(hidden)), y)


def work(rank: int, store: str, arguments: Namespace) -> None:
    """Train with both engines in one of the two processes; the first one reports."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(2)
    data = [(x, torch.sin(x).sum(1, keepdim=True)) for x in torch.randn(arguments.steps, 64, 16)]
    torch.manual_seed(rank)
    model = Half(arguments.hidden // 2)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = train(model, data), train(module, data)
    if rank == 0:
        calls = ", ".join(site.func_name for site in module.exported.python_ops)
        worst = max(abs(a - b) for a, b in zip(eager, ort, strict=True))
        print(f"Functions in the graph of each process: {calls}")
        print(f"Loss: {eager[0]:.4f} to {eager[-1]:.4f}. Largest difference: {worst:.1e}")
        save_plot(arguments.output / "two_processes.png", eager, ort)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", settings(__doc__, steps=300, hidden=64, output=Path())), nprocs=2)
