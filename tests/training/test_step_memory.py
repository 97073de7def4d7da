"""The runtime's memory for large tensors: reused from step to step, and returned when a module is deleted."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square

ROOT = Path(__file__).parents[2]


class LargeActivations(nn.Module):
    """Its activations are of 1 MiB and more, which the runtime's allocator maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 512)

    def forward(self, x):
        return torch.tanh(self.last(Square.apply(torch.tanh(self.first(x)))))


def batches(count=2):
    return [(torch.randn(1024, 64),) for _ in range(count)]


def gradients(model, x):
    output = model(x)
    return [output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))]


def test_two_threads_with_a_module_each_compute_as_eager():
    models = [LargeActivations(), LargeActivations()]
    inputs = [x for (x,) in batches()]
    expected = [gradients(model, x) for model, x in zip(models, inputs, strict=True)]
    wrapped = [torch2ort.ORTModule(copy.deepcopy(model)) for model in models]
    found: dict[int, list[list[torch.Tensor]]] = {0: [], 1: []}

    def run(i: int) -> None:
        for _ in range(8):
            found[i].append(gradients(wrapped[i], inputs[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(results) for results in found.values()] == [8, 8]
    for i, results in found.items():
        for result in results:
            for value, reference in zip(result, expected[i], strict=True):
                assert_same(value, reference, f"thread {i}")


def test_outputs_and_gradients_outlive_the_module():
    model = LargeActivations()
    wrapped, [(x,)] = torch2ort.ORTModule(copy.deepcopy(model)), batches(1)
    kept = gradients(wrapped, x)
    del wrapped
    gc.collect()
    other = torch2ort.ORTModule(LargeActivations())
    gradients(other, torch.randn(1024, 64))
    for value, reference in zip(kept, gradients(model, x), strict=True):
        assert_same(value, reference, "after the module")


def test_workers_of_a_dataloader_are_forked_between_steps():
    loader = DataLoader(TensorDataset(torch.randn(2048, 64)), batch_size=1024, num_workers=2)
    model = LargeActivations()
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    for _ in range(2):
        for (x,) in loader:
            for value, reference in zip(gradients(wrapped, x), gradients(model, x), strict=True):
                assert_same(value, reference, "with workers")


def test_a_forked_process_frees_tensors_while_a_thread_of_the_parent_steps():
    wrapped, [(x,)] = torch2ort.ORTModule(LargeActivations()), batches(1)
    gradients(wrapped, x)
    done = threading.Event()

    def step() -> None:
        while not done.is_set():
            gradients(wrapped, x)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        codes = [exit_code_of_a_fork_that_frees(gradients(wrapped, x)) for _ in range(10)]
    finally:
        done.set()
        thread.join()
    assert codes == [0] * 10


def exit_code_of_a_fork_that_frees(tensors):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a lock that no thread of this process would release
        tensors.clear()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_script(text):
    """Run a script in a process of its own, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_returned_to_the_system_with_the_module():
    before, after = run_script("""
        import gc, torch, torch2ort
        from torch import nn
        from tests.support.memory import resident_bytes
        layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]
        model = torch2ort.ORTModule(nn.Sequential(*layers))
        x = torch.randn(4096, 512)
        for _ in range(3):
            model(x).square().mean().backward()
        before = resident_bytes() >> 20
        del model
        gc.collect()
        print(before, resident_bytes() >> 20)
    """)
    assert int(before) - int(after) >= 32  # MiB: at least four of the seven activations of 8 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_a_system_without_huge_pages_computes_the_same():
    assert run_script("""
        import copy, ctypes, torch, torch2ort
        from tests.training.test_step_memory import LargeActivations, gradients
        PR_SET_THP_DISABLE = 41
        assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        model, x = LargeActivations(), torch.randn(1024, 64)
        wrapped = torch2ort.ORTModule(copy.deepcopy(model))
        for value, reference in zip(gradients(wrapped, x), gradients(model, x)):
            torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)
        print("same")
    """) == ["same"]
