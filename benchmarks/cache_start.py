"""Time from ``ORTModule(model)`` to the end of the first training step, with an empty and a filled cache.

It is that of the engine that the installed onnxruntime trains with. Each start is a process of its own; its
imports, the model and the data come before the clock starts. So does one collection of their garbage, which
Python would else do at a moment of its own, in some starts and not in others.
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
Start = dict[str, float | bool | str]


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


def measure(name: str, cache: str | None) -> Start:
    """Return the seconds of the first step, also of CPU, and of a later one; eager's if `cache` is None."""
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
    module = (
        model if cache is None else torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=cache))
    )
    loss = step(module)
    first, cpu = time.perf_counter() - start, time.process_time() - start_of_cpu
    later = []
    for _ in range(3):
        start = time.perf_counter()
        step(module)
        later.append(time.perf_counter() - start)
    hit = cache is not None and module.exported.cache.hit
    engine = "" if cache is None else module.engine
    return {"first": first, "cpu": cpu, "later": min(later), "hit": hit, "loss": loss, "engine": engine}


def measure_in_a_process(name: str, cache: str | None) -> Start:
    """Return what :func:`measure` returns in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, *([cache] if cache else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str) -> None:
    """Check that all starts reach the same loss, and print one line."""
    runs: dict[str, list[Start]] = {"eager": [], "cold": [], "warm": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            runs["eager"].append(measure_in_a_process(name, None))
            runs["cold"].append(measure_in_a_process(name, cache))
            runs["warm"].append(measure_in_a_process(name, cache))
    assert not any(run["hit"] for run in runs["cold"])
    assert all(run["hit"] for run in runs["warm"])
    for way in ("cold", "warm"):
        torch.testing.assert_close(runs[way][0]["loss"], runs["eager"][0]["loss"], rtol=1e-4, atol=1e-5)
    first, cpu = (
        {way: statistics.median(float(run[what]) for run in found) for way, found in runs.items()}
        for what in ("first", "cpu")
    )
    added = {
        way: statistics.median(float(run["first"]) - float(run["later"]) for run in found)
        for way, found in runs.items()
    }
    ratio, of_cpu, of_added = (found["cold"] / found["warm"] for found in (first, cpu, added))
    print(
        f"{name}, engine {runs['cold'][0]['engine']}, start to the end of the first step, 1 thread: cold "
        f"{first['cold']:.2f} s, warm "
        f"{first['warm']:.2f} s, ratio {ratio:.1f} (of CPU time {of_cpu:.1f}, without the step itself "
        f"{of_added:.0f}); eager's first step {first['eager']:.2f} s"
    )


def main() -> None:
    """Measure one start if told to, else all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs="+", help="name of a model, and the folder of its cache")
    measured = parser.parse_args().measure
    if measured:
        print(json.dumps(measure(measured[0], measured[1] if len(measured) > 1 else None)))
        return
    for name in MODELS:
        compare(name)


if __name__ == "__main__":
    main()
