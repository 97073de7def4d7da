"""Threads that call one module, or several, while graphs are exported and engines built for them."""

from __future__ import annotations

import copy
import os
import threading
import time

import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square
from torch2ort.cache.key.export_lock import exclusive

THREADS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(Square.apply(self.norm(self.first(x))))


def gradients(model, x, parameters=None):
    """Output and gradients; pass ``parameters`` if an export may have replaced the model's meanwhile."""
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), parameters or list(model.parameters()))]


def in_threads(work):
    """Run ``work`` with each thread's number, all at once, and return the results."""
    found, start = [None] * THREADS, threading.Barrier(THREADS)

    def run(i):
        start.wait()
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [result for result in found if isinstance(result, Exception)]
    if failures:
        raise failures[0]
    return found


def pair():
    net = Net().eval()
    return net, torch2ort.ORTModule(copy.deepcopy(net))


def test_first_calls_of_threads_are_eagers():
    eager, model = pair()
    x, parameters = torch.randn(5, 6), list(model.parameters())
    for found in in_threads(lambda i: gradients(model, x + i * 0, parameters)):
        assert_same(found, gradients(eager, x), "gradients")


def test_a_module_serves_threads_while_one_of_them_exports_other_sizes():
    eager, model = pair()
    gradients(model, torch.randn(5, 6))
    parameters = list(model.parameters())

    def work(i):
        batches = [torch.randn(5 if i else 6 + k, 6) for k in range(4)]
        return [(batch, gradients(model, batch, parameters)) for batch in batches]

    for batch, found in (pair for result in in_threads(work) for pair in result):
        assert_same(found, gradients(eager, batch), "gradients")


def test_threads_export_modules_of_their_own_at_once():
    pairs = [pair() for _ in range(THREADS)]
    x = torch.randn(5, 6)
    for i, found in enumerate(in_threads(lambda i: gradients(pairs[i][1], x))):
        assert_same(found, gradients(pairs[i][0], x), "gradients")


def outcome(module, x):
    """Gradients, or none: PyTorch with CUDA refuses a backward in a fork of a process that ran one."""
    try:
        return gradients(module, x)
    except Exception as error:
        if "fork-based multiprocessing" not in str(error):
            raise
        return []


def test_an_export_of_another_thread_reaches_no_child():
    eager, model = pair()
    x, exporting = torch.randn(5, 6), threading.Event()

    def export():
        with exclusive.exporting():
            exporting.set()
            time.sleep(1)

    thread = threading.Thread(target=export)
    thread.start()
    exporting.wait()
    child = os.fork()
    if child == 0:
        try:
            found, expected = (outcome(module, x) for module in (model, eager))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            os._exit(0)
        except BaseException:
            os._exit(1)
    thread.join()
    deadline = time.monotonic() + 100
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended == (child, 0)
