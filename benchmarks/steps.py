"""Training steps by default and with ``mode="max"``, as ratios to eager PyTorch and to torch.compile.

Names of rows as arguments select rows.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
from _machine import machine
from _models import HIDDEN, LAYERS, LENGTH, MODELS, batch
from _timing import interleaved_medians
from pythonop_overhead import FUNCTIONS
from pythonop_overhead import Chain as Opaque
from torch import Tensor, nn

import torch2ort

BATCH = 8
WAYS = {"default": torch2ort.Options(), "max": torch2ort.Options(mode="max")}


class Squared(nn.Module):
    """The mean square of a net's output, as a loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Last(nn.Module):
    """A layer behind the last result of a recurrent net."""

    def __init__(self, net: nn.RNNBase) -> None:
        super().__init__()
        self.net, self.last = net, nn.Linear(net.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x)[0][:, -1])


def normalized(taken: int, given: int, size: int = 3, **settings: int) -> list[nn.Module]:
    """A convolution with BatchNorm and ReLU."""
    convolution = nn.Conv2d(taken, given, size, padding=size // 2, bias=False, **settings)
    return [convolution, nn.BatchNorm2d(given), nn.ReLU()]


def convolutions() -> nn.Module:
    """Six convolutions, three of them with strides."""
    sizes = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    layers = [layer for taken, given, stride in sizes for layer in normalized(taken, given, stride=stride)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def pooled() -> nn.Module:
    """Four convolutions with a max pool between them."""
    first, last = [*normalized(3, 32), *normalized(32, 32)], [*normalized(32, 64), *normalized(64, 64)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*first, nn.MaxPool2d(2), *last, *head)


def depthwise() -> nn.Module:
    """A convolution, and five depthwise ones with a pointwise one behind each, as MobileNet has them."""
    layers = normalized(3, 32)
    for taken, given, stride in [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]:
        layers += normalized(taken, taken, stride=stride, groups=taken) + normalized(taken, given, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


# The name of a net -> the function that makes it, and the sizes of its input.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv + BatchNorm": (lambda: Squared(convolutions()), (BATCH, 3, 32, 32)),
    "conv + BatchNorm, max pool": (lambda: Squared(pooled()), (BATCH, 3, 32, 32)),
    "depthwise conv + BatchNorm": (lambda: Squared(depthwise()), (BATCH, 3, 32, 32)),
    "LSTM": (lambda: Squared(Last(nn.LSTM(64, 128, 2, batch_first=True))), (16, 32, 64)),
    "GRU": (lambda: Squared(Last(nn.GRU(64, 128, 2, batch_first=True))), (16, 32, 64)),
    f"{FUNCTIONS} Functions": (lambda: Opaque(FUNCTIONS), (4, 8)),
    f"{FUNCTIONS} Functions, a tanh behind each": (lambda: Opaque(FUNCTIONS, spaced=True), (4, 8)),
}


def step(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, adamw: bool) -> Callable[[], Tensor]:
    """Return a training step of `module`, which returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4) if adamw else None

    def run() -> Tensor:
        (optimizer or module).zero_grad()
        loss = loss_of(module)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return run


def compare(title: str, model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, adamw: bool) -> None:
    """Check that all engines agree, time them, and print one line."""
    modules: dict[str, nn.Module] = {
        way: torch2ort.ORTModule(copy.deepcopy(model), options=options) for way, options in WAYS.items()
    }
    modules |= {"compile": torch.compile(copy.deepcopy(model)), "eager": model}
    ways = {way: step(module, loss_of, adamw=adamw) for way, module in modules.items()}
    for _ in range(3):
        losses = {way: run() for way, run in ways.items()}
        for loss in losses.values():
            torch.testing.assert_close(loss, losses["eager"], rtol=1e-3, atol=1e-4)
    seconds = interleaved_medians(ways, rounds=25, calls=calls(ways["eager"]), clock=time.thread_time)
    print(f"{title}, 1 thread: {format_ratios(seconds)}", flush=True)


def calls(run: Callable[[], Tensor]) -> int:
    """Return the number of steps that take 20 milliseconds."""
    taken = []
    for _ in range(3):
        start = time.thread_time()
        run()
        taken.append(time.thread_time() - start)
    return max(1, int(0.02 / max(statistics.median(taken), 1e-6)))


def format_ratios(seconds: Mapping[str, float]) -> str:
    """Return the ratios of one row."""
    eager, compiled = seconds["eager"], seconds["compile"]
    ratios = [
        f"{way} {seconds[way] / eager:.2f} of eager, {seconds[way] / compiled:.2f} of torch.compile"
        for way in WAYS
    ]
    return f"{'; '.join(ratios)} (which is {compiled / eager:.2f} of eager)"


def main() -> None:
    """Print one line per row."""
    torch.set_num_threads(1)
    print(machine(), flush=True)
    chosen = sys.argv[1:] or [*MODELS, *NETS]
    for name in chosen:
        if name in MODELS:
            given = batch(name, BATCH)
            title = f"{name} {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, AdamW step"
            compare(title, MODELS[name](), lambda module, given=given: module(**given).loss, adamw=True)
        else:
            make, sizes = NETS[name]
            torch.manual_seed(0)
            model, x = make().train(), torch.randn(sizes)
            title = f"{name}, {'x'.join(map(str, sizes))}, forward + backward"
            compare(title, model, lambda module, x=x: module(x), adamw=False)


if __name__ == "__main__":
    main()
