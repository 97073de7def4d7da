"""Train a network with 4-bit weights by Lightning, in eager PyTorch and on ONNX Runtime.

The weights are rounded by :class:`Quantise`, an autograd Function whose backward lets gradients through as if
nothing had been rounded, and learns the size of a step. It stays a node of the graph. Lightning trains an
ORTModule instead of its module; validation, checkpoints and the progress bar work as before.

Run it with ``python examples/lightning_quantised.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import warnings

import lightning
import torch
from torch import Tensor, nn

import torch2ort


class Quantise(torch.autograd.Function):
    """Rounds to multiples of `step`, at most `most` of them in either direction (LSQ, Esser et al. 2019)."""

    @staticmethod
    def forward(ctx, x: Tensor, step: Tensor, most: int) -> Tensor:
        scaled = x / step
        ctx.save_for_backward(scaled)
        ctx.most = most
        return scaled.round().clamp(-most, most) * step

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scaled,) = ctx.saved_tensors
        inside = scaled.abs() <= ctx.most
        of_step = torch.where(inside, scaled.round() - scaled, scaled.sign() * ctx.most)
        scale = (scaled.numel() * ctx.most) ** -0.5
        return grad * inside, (grad * of_step).sum().reshape(1) * scale, None


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight has `bits` bits."""

    def __init__(self, inputs: int, outputs: int, bits: int) -> None:
        super().__init__(inputs, outputs)
        self.most = 2 ** (bits - 1) - 1
        self.step = nn.Parameter(self.weight.detach().abs().max().reshape(1) / self.most)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Quantise.apply(self.weight, self.step, self.most), self.bias)


class Classifier(lightning.LightningModule):
    """Classifies a point in 16 dimensions by the corner of a square, of four, that it comes from."""

    def __init__(self, width: int = 64, bits: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            QuantisedLinear(16, width, bits),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            QuantisedLinear(width, 4, bits),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32 (rows, 4) of points float32 (rows, 16)."""
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("validation_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Losses(lightning.Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        self.values.append(float(outputs["loss"]))


def data(rows: int) -> torch.utils.data.TensorDataset:
    """Return noisy points float32 (rows, 16) around four corners, and the corners, int64 (rows,)."""
    generator = torch.Generator().manual_seed(1)
    corners = torch.randn(4, 16, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    return torch.utils.data.TensorDataset(corners[y] + 1.5 * torch.randn(rows, 16, generator=generator), y)


def fit(module: lightning.LightningModule, epochs: int, rows: int) -> tuple[list[float], float]:
    """Return the losses of all steps, and the accuracy of the model that Lightning loads from its file."""
    points = data(rows + 256)
    train, held = torch.utils.data.random_split(points, (rows, 256), torch.Generator().manual_seed(2))
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[losses],
        )
        validation = torch.utils.data.DataLoader(held, batch_size=64)
        trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=64), validation)
        loaded = type(module).load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        (found,) = trainer.validate(loaded, validation, verbose=False)
    return losses.values, found["accuracy"]


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2048, help="points to train with (default: %(default)s)")
    settings = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Warnings about the number of workers that load data, and similar ones.
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(1)
    eager = Classifier()
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    (losses, accuracy), (ort_losses, ort_accuracy) = (
        fit(module, settings.epochs, settings.rows) for module in (eager, ort)
    )
    print(f"Functions in the graph: {', '.join(site.func_name for site in ort.exported.python_ops)}")
    # The last bit of a weight on the border between two steps decides which one it is rounded to.
    first = max(abs(a - b) for a, b in zip(losses[:10], ort_losses[:10], strict=True))
    print(f"Loss of step 1 and {len(losses)}: eager {losses[0]:.4f}, {losses[-1]:.4f}; ", end="")
    print(
        f"ONNX Runtime {ort_losses[0]:.4f}, {ort_losses[-1]:.4f}. In the first 10 they differ by {first:.1e}"
    )
    print(f"Accuracy of the checkpoints: eager {accuracy:.3f}, ONNX Runtime {ort_accuracy:.3f}")


if __name__ == "__main__":
    main()
