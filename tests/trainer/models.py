"""A small model, its description, and its training loop in PyTorch for comparison with trainers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch2ort.trainer import ORTTrainer, ORTTrainerOptions, optim

DESCRIPTION = {
    "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}
cross_entropy = torch.nn.functional.cross_entropy


class Net(torch.nn.Module):
    """Maps four numbers to three logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def started() -> Net:
    """The model with the same initial weights each time."""
    torch.manual_seed(5)
    return Net()


def batches(count: int, size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same data each time."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        x = torch.randn(size, 4, generator=generator)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def options(**groups: Any) -> ORTTrainerOptions:
    """Options for the CPU."""
    return ORTTrainerOptions({"device": {"id": "cpu"}, **groups})


def trainer(model: torch.nn.Module | None = None, config: Any = None, **groups: Any) -> ORTTrainer:
    """A trainer of the small model."""
    model = started() if model is None else model
    config = optim.SGDConfig(lr=0.1) if config is None else config
    return ORTTrainer(model, DESCRIPTION, config, cross_entropy, options(**groups))


def eager(
    steps: int,
    make: Callable[[torch.nn.Module], Callable[[float], None]],
    *,
    frozen: str = "",
    accumulate: int = 1,
    clip: float | None = None,
    rates: Callable[[int], float] = lambda update: 0.1,
) -> tuple[torch.nn.Module, list[float]]:
    """Run the loop in PyTorch; return the model after `steps` steps, and the losses.

    Args:
        steps: calls of the model.
        make: returns a function that updates the model's weights at a learning rate.
        frozen: name of a weight that is not trained.
        accumulate: calls between two updates.
        clip: limit of the gradients' norm.
        rates: the learning rate of each update.
    """
    model, losses = copy.deepcopy(started()), []
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    update, done = make(model), 0
    for step, (x, y) in enumerate(batches(steps), start=1):
        loss = cross_entropy(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if step % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            update(rates(done))
            done += 1
            model.zero_grad()
    return model, losses
