"""A step of training files against eager PyTorch with its fused optimizer, and what Python adds to it."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from _machine import processor
from _models import HIDDEN, LAYERS, LENGTH, batch, bert
from _timing import interleaved_medians
from torch import nn

import torch2ort
from torch2ort import optim
from torch2ort.artifacts import TrainingSession

BATCH = 8


def mlp() -> nn.Module:
    """Three linear layers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def eager(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[], float]:
    """A training step of eager PyTorch, with its fused optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        return value.item()

    return step


def session(artifacts: torch2ort.TrainingArtifacts) -> TrainingSession:
    """A session of one thread over saved files."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        artifacts.save(Path(folder))
        return TrainingSession(folder, session_options=settings)


def compare(name: str, ways: dict[str, Callable[[], float]], rounds: int, calls: int) -> float:
    """Check that both functions agree, time them, and print one line.

    Returns:
        Seconds of a step of the files.
    """
    for _ in range(3):
        losses = {way: step() for way, step in ways.items()}
        assert abs(losses["files"] - losses["eager"]) < 1e-4 + 1e-3 * losses["eager"], losses
    seconds = interleaved_medians(ways, rounds=rounds, calls=calls, warm_up=3, clock=time.thread_time)
    ratio = seconds["files"] / seconds["eager"]
    print(
        f"{name}, AdamW step, 1 thread: training files {ratio:.2f} of eager with its fused optimizer",
        flush=True,
    )
    return seconds["files"]


def python_side(one: TrainingSession, given: Any) -> float:
    """Seconds of a step without the run of the graph."""
    run = one._runs[0]._session.run_with_iobinding
    bindings = [r._binding for r in one._runs]
    ways = {"step": lambda: one.step(given), "run": lambda: run(bindings[one._state.current])}
    seconds = interleaved_medians(ways, rounds=200, calls=5, clock=time.thread_time)
    return seconds["step"] - seconds["run"]


def main() -> None:
    """Print one line per model, and one about Python."""
    torch.set_num_threads(1)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    model, loss = mlp(), nn.functional.cross_entropy
    optimizer = optim.AdamW(lr=1e-4)
    small = session(torch2ort.export_training(model, (x, y), loss=loss, optimizer=optimizer))
    given = x.numpy(), y.numpy()
    ways = {
        "files": lambda: small.step(given)["loss"],
        "eager": eager(copy.deepcopy(model), lambda m: loss(m(x), y)),
    }
    compare("MLP 64-256-256-10, batch 32", ways, rounds=60, calls=10)
    print(f"Python's part of a step: {1e6 * python_side(small, given):.0f} microseconds", flush=True)

    net, arguments = bert(), batch("BERT", BATCH)
    large = session(torch2ort.export_training(net, arguments, optimizer=optimizer))
    arrays = {key: value.numpy() for key, value in arguments.items()}
    ways = {
        "files": lambda: large.step(arrays)["loss"],
        "eager": eager(copy.deepcopy(net), lambda m: m(**arguments).loss),
    }
    compare(f"BERT {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers", ways, rounds=10, calls=1)
    print(f"({processor()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__})")


if __name__ == "__main__":
    main()
