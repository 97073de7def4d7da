"""DistributedDataParallel around an ORTModule averages gradients as it does around the model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist

import torch2ort
from tests.program.sparsity.padded_encoder import Encoder, batch
from tests.support.functions import Square
from tests.support.processes import in_two_processes


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Square.apply(self.first(x)))


def _train(rank: int) -> None:
    torch.manual_seed(3)
    eager = Model()
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    modules = [torch.nn.parallel.DistributedDataParallel(m) for m in (eager, ort)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in modules]
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
        for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, e.grad, rtol=1e-4, atol=1e-5, msg=f"step {step}, {name}")
        for optimizer in optimizers:
            optimizer.step()


def _train_padded(rank: int) -> None:
    torch.manual_seed(3)
    eager = Encoder()
    ort = torch2ort.ORTModule(copy.deepcopy(eager), options=torch2ort.Options(sparsity="padding"))
    wrap = functools.partial(torch.nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    modules = [wrap(m) for m in (eager, ort)]
    for step in range(4):
        # A batch with one valid row is dense, so the graphs of the two ranks differ in half of the steps.
        given = batch((1, 0, 0, 0), labelled=1) if rank == step % 2 else batch((3, 9, 2, 5), seed=step)
        for module in modules:
            module.zero_grad()
            module(**given).backward()
        assert ort.density["plan"] == ("dense" if rank == step % 2 else "padding")
        for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, e.grad, rtol=1e-4, atol=1e-5, msg=f"step {step}, {name}")


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed package")
def test_two_processes_on_gloo():
    in_two_processes(_train)


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed package")
def test_ranks_leave_out_the_padding_of_their_own_batches():
    in_two_processes(_train_padded)
