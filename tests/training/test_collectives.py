"""Functions that exchange tensors between processes run in a graph, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import torch2ort
from tests.support.processes import in_two_processes


class Copy(torch.autograd.Function):
    """Returns the same in each process; backward adds up the gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """The sum of the tensors of all processes."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def scattered(x):
    total = x.clone()
    dist.all_reduce(total)
    return total.chunk(2)[dist.get_rank()].clone()


class AllGather(torch.autograd.Function):
    """The rows of all processes; backward returns to each the sum of its rows' gradients."""

    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad)


class ReduceScatter(torch.autograd.Function):
    """A process's rows of the sum; backward gathers."""

    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad)


class Parallel(torch.nn.Module):
    """A feed-forward, half of which is in each process, between parts of a sequence."""

    def __init__(self, whole: list[torch.nn.Linear], rank: int) -> None:
        super().__init__()
        up, down = whole
        self.up = torch.nn.Linear(4, 3)
        self.down = torch.nn.Linear(3, 4, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(2)[rank])
            self.up.bias.copy_(up.bias.chunk(2)[rank])
            self.down.weight.copy_(down.weight.chunk(2, 1)[rank])

    def forward(self, x):
        hidden = self.down(torch.tanh(self.up(Copy.apply(x))))
        h = Reduce.apply(hidden)
        return ReduceScatter.apply(self.down(torch.tanh(self.up(AllGather.apply(h)))))


def train(rank: int, around_all: bool) -> None:
    torch.manual_seed(1)
    whole = [torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)]
    eager = Parallel(whole, rank)
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    names = {"Copy", "Reduce", "AllGather", "ReduceScatter"}
    modules = [torch.nn.parallel.DistributedDataParallel(m) if around_all else m for m in (eager, ort)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    for step in range(5):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        results = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            given = x.clone().requires_grad_()
            optimizer.zero_grad()
            output = module(given)
            output.square().mean().backward()
            results.append((output.detach(), given.grad, [p.grad.clone() for p in module.parameters()]))
            optimizer.step()
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5, msg=f"step {step}")
    assert {site.func_name.rpartition(".")[2] for site in ort.exported.python_ops} == names


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed package")
@pytest.mark.parametrize("around_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_collectives_in_functions(around_all):
    in_two_processes(train, around_all)
