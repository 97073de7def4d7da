"""Train one model in two processes, each of which holds half of every weight (tensor parallelism).

The first weight is split by its outputs, the second by its inputs. Two autograd Functions exchange tensors
between the halves: :class:`Copy` adds up gradients in backward, :class:`Reduce` adds up outputs in forward.
On ONNX Runtime they stay nodes that call ``torch.distributed``. Both processes train the same batches in
eager PyTorch and on ONNX Runtime, and compare.

Run it with ``python examples/two_processes.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import torch2ort


class Copy(torch.autograd.Function):
    """Passes the same input to each process; backward adds up their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Adds up the processes' results; backward passes the whole gradient to each."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clone()


class Half(nn.Module):
    """This process's half of a feed-forward of `hidden` units; maps (rows, 16) to (rows, 1)."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        # The same weights in each process, which keeps its half of them.
        first, last = nn.Linear(16, hidden), nn.Linear(hidden, 1)
        mine = slice(rank * hidden // 2, (rank + 1) * hidden // 2)
        self.first_weight = nn.Parameter(first.weight.detach()[mine].clone())
        self.first_bias = nn.Parameter(first.bias.detach()[mine].clone())
        self.last_weight = nn.Parameter(last.weight.detach()[:, mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(Copy.apply(x), self.first_weight, self.first_bias))
        return Reduce.apply(nn.functional.linear(hidden, self.last_weight))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Return the loss of one step."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def work(rank: int, port: int, settings: argparse.Namespace) -> None:
    """Train with both engines in one of the two processes; the first one reports."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(1)
    eager = Half(settings.hidden, rank)
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    sides = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (eager, ort)]
    losses: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(2)
    for _ in track(range(settings.steps), "two processes", disable=rank != 0):
        x = torch.randn(64, 16, generator=generator)
        y = torch.sin(x).sum(1, keepdim=True)
        for found, (model, optimizer) in zip(losses, sides, strict=True):
            found.append(step(model, optimizer, x, y))
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    if rank == 0:
        calls = ", ".join(site.func_name for site in ort.exported.python_ops)
        print(f"Functions in the graph of each process: {calls}")
        print(f"Loss: {losses[0][0]:.4f} to {losses[0][-1]:.4f}. Largest difference: {worst:.1e}")
        save_plot(*losses, settings.output / "two_processes.png")
    dist.barrier()
    dist.destroy_process_group()


def save_plot(eager: list[float], ort: list[float], path: Path) -> None:
    """Plot both losses in one diagram."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(eager) + 1), eager, linewidth=3, alpha=0.4, label="eager PyTorch")
    axes.semilogy(range(1, len(ort) + 1), ort, "--", linewidth=1, color="black", label="ONNX Runtime")
    axes.set_xlabel("step")
    axes.set_ylabel("mean squared error")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"Loss plot: {path}")


def main() -> None:
    """Start the two processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="units, an even number (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the plot (default: here)")
    settings = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port, settings), nprocs=2, join=True)


if __name__ == "__main__":
    main()
