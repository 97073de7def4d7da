"""Time from ``ORTModule(model)`` to the end of the first training step, with an empty and a filled cache.

Each start is a process of its own; its imports, the model and the data come before the clock starts. So does
one collection of their garbage, which Python would else do at a moment of its own, in some starts and not in
others.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _models
import onnxruntime  # noqa: F401 - an import, so not part of the start
import torch
from torch import Tensor, nn

import torch2ort

torch2ort.ORTModule  # noqa: B018 - imports what starts; the package itself imports nothing of it

sys.path.append(str(Path(__file__).parent.parent / "examples"))

ROUNDS = 3
Step = Callable[[nn.Module], Tensor]
Start = dict[str, float | bool]


def bert() -> tuple[nn.Module, Step]:
    """Return `train_step.py`'s BERT, and what computes its loss."""
    batch = _models.batch("BERT", 8)
    return _models.bert(), lambda module: module(**batch).loss


def demo() -> tuple[nn.Module, Step]:
    """Return the example's transformer at its default size, and what computes its loss."""
    from char_transformer import CharTransformer

    tokens = torch.randint(90, (16, 65))
    model = CharTransformer(symbols=90, context=64, width=128, layers=3, heads=4)
    return model, lambda module: module(tokens[:, :-1], tokens[:, 1:])


MODELS = {"tiny BERT": bert, "the demo's transformer": demo}


def measure(name: str, way: str, cache: str) -> Start:
    """Return the seconds of the first step, also of CPU, and of a later one."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(module: nn.Module) -> float:
        loss = loss_of(module)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    gc.collect()
    start, start_of_cpu = time.perf_counter(), time.process_time()
    options = torch2ort.Options(cache_dir=cache)
    module = model if way == "eager" else torch2ort.ORTModule(model, options=options)
    loss = step(module)
    first, cpu = time.perf_counter() - start, time.process_time() - start_of_cpu
    later = []
    for _ in range(3):
        start = time.perf_counter()
        step(module)
        later.append(time.perf_counter() - start)
    hit = way != "eager" and module.exported.cache.hit
    return {"first": first, "cpu": cpu, "later": min(later), "hit": hit, "loss": loss}


def measure_in_a_process(name: str, way: str, cache: str) -> Start:
    """Return what :func:`measure` returns in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, way, cache]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str) -> None:
    """Check that all starts reach the same loss, and print one line."""
    runs: dict[str, list[Start]] = {"eager": [], "cold": [], "warm": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            for way, found in runs.items():
                found.append(measure_in_a_process(name, way, cache))
    for way, found in runs.items():
        assert all(run["hit"] == (way == "warm") for run in found)
        torch.testing.assert_close(found[0]["loss"], runs["eager"][0]["loss"], rtol=1e-4, atol=1e-5)
    print(line(name, runs), flush=True)


def line(name: str, runs: dict[str, list[Start]]) -> str:
    """The seconds of cold and warm starts, and their ratios."""

    def median(way: str, seconds: Callable[[Start], float]) -> float:
        return statistics.median(seconds(run) for run in runs[way])

    def cold_of_warm(seconds: Callable[[Start], float]) -> float:
        return median("cold", seconds) / median("warm", seconds)

    return (
        f"{name}, start to the end of the first step, 1 thread: cold {median('cold', first):.2f} s, warm "
        f"{median('warm', first):.2f} s, ratio {cold_of_warm(first):.1f} (of CPU time "
        f"{cold_of_warm(cpu):.1f}, without the step itself "
        f"{cold_of_warm(lambda run: run['first'] - run['later']):.0f}); eager's first step "
        f"{median('eager', first):.2f} s"
    )


def first(run: Start) -> float:
    """Seconds of the clock to the end of the first step."""
    return run["first"]


def cpu(run: Start) -> float:
    """Seconds of CPU to the end of the first step."""
    return run["cpu"]


def main() -> None:
    """Measure one start if told to, else all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=3, help="model, eager or another way, folder of the cache")
    measured = parser.parse_args().measure
    if measured:
        print(json.dumps(measure(*measured)))
        return
    for name in MODELS:
        compare(name)


if __name__ == "__main__":
    main()
