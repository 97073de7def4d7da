"""Train a network with 4-bit weights by Lightning, in eager PyTorch and on ONNX Runtime.

:class:`Quantise` rounds the weights; its backward lets gradients through as if nothing had been rounded.
Lightning trains an ORTModule instead of its module.
Run it with ``python examples/lightning_quantised.py``; ``--help`` lists the settings. It prints:

    Functions in the graph: __main__.Quantise, __main__.Quantise
    Losses of the first 10 steps: 1.3868 to 0.7338; they differ by 3.3e-06
"""

from __future__ import annotations

import copy

import lightning
import torch
from lightning.pytorch.callbacks import LambdaCallback
from shared import settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch2ort


class Quantise(torch.autograd.Function):
    """Rounds to one of 15 multiples of `step`; backward passes the gradient where nothing was clamped."""

    @staticmethod
    def forward(ctx, weight: Tensor, step: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.most = 7 * step
        return (weight / step).round().clamp(-7, 7) * step

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * (weight.abs() <= ctx.most), None


class QuantisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Quantise.apply(self.weight, 0.05), self.bias)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = QuantisedLinear(16, 64), nn.BatchNorm1d(64), QuantisedLinear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    arguments = settings(__doc__, epochs=5, rows=2048)
    torch.manual_seed(1)
    corners, y = torch.randn(4, 16), torch.randint(4, (arguments.rows,))
    points = TensorDataset(corners[y] + 1.5 * torch.randn(arguments.rows, 16), y)
    model = Classifier()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    losses: list[float] = []
    record = LambdaCallback(on_train_batch_end=lambda *given: losses.append(float(given[2]["loss"])))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    for one in (model, module):
        trainer = lightning.Trainer(
            max_epochs=arguments.epochs, callbacks=[record], accelerator="cpu", **quiet
        )
        trainer.fit(one, DataLoader(points, batch_size=64))
    eager, ort = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    print(f"Functions in the graph: {', '.join(site.func_name for site in module.exported.python_ops)}")
    # Later, the last bit of a weight on the border between two steps decides which one it is rounded to.
    worst = max(abs(a - b) for a, b in zip(eager[:10], ort[:10], strict=True))
    print(f"Losses of the first 10 steps: {eager[0]:.4f} to {eager[9]:.4f}; they differ by {worst:.1e}")
